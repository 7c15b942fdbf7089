// Random sleeps, to expose missing synchronization. Declaration: builtins/debug.py.
#pragma once
#include "context.cuh"

namespace tw {

template <int seed, int place> __device__ __forceinline__ void delay(int64_t context) {
  uint32_t x = seed * 0x9E3779B9u + place * 0x85EBCA6Bu;
  x ^= (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) * 0xC2B2AE35u;
  x ^= reinterpret_cast<const Context *>(context)->rank * 0x27D4EB2Fu;
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 13;
  __nanosleep(x % 8 == 0 ? x >> 18 : x >> 22); // one of eight sleeps is long
}

} // namespace tw
