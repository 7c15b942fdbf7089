// Events for traces. Declarations: builtins/debug.py.
// PTX ISA: special registers %globaltimer and %smid; atom.
#pragma once
#include "context.cuh"

namespace tw {

__device__ __forceinline__ int64_t globaltimer() { return static_cast<int64_t>(now_ns()); }

// The time is read first, so that it does not include the recording itself. The event goes to a
// slot of its own: blocks and warps record at the same time.
template <int event>
__device__ __forceinline__ void record(int64_t begin, const void *flag, int64_t seen,
                                       int64_t wanted, int64_t context, int32_t launch) {
  const uint64_t end = now_ns();
  TraceBuffer *buffer = reinterpret_cast<const Context *>(context)->trace;
  if (buffer == nullptr || launch < 0) {
    return;
  }
  uint64_t slot;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;"
               : "=l"(slot)
               : "l"(&buffer->count)
               : "memory");
  if (slot >= buffer->capacity) {
    return;
  }
  TraceEvent *out = reinterpret_cast<TraceEvent *>(buffer + 1) + slot;
  out->begin = begin != 0 ? static_cast<uint64_t>(begin) : end;
  out->end = end;
  out->flag = reinterpret_cast<uint64_t>(flag);
  out->seen = seen;
  out->wanted = wanted;
  out->launch = launch;
  out->event = event;
  out->block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  asm volatile("mov.u32 %0, %%smid;" : "=r"(out->sm));
}

} // namespace tw
