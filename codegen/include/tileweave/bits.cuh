// Values as bits, because memory instructions move bits, and TileLang prints various C++ types.
#pragma once
#include <stdint.h>

namespace tw {

struct Raw128 {
  uint64_t low, high;
};

namespace detail {
template <int bytes> struct RawOf;
template <> struct RawOf<1> {
  using type = uint8_t;
};
template <> struct RawOf<2> {
  using type = uint16_t;
};
template <> struct RawOf<4> {
  using type = uint32_t;
};
template <> struct RawOf<8> {
  using type = uint64_t;
};
template <> struct RawOf<16> {
  using type = Raw128;
};
} // namespace detail

template <int bytes> using Raw = typename detail::RawOf<bytes>::type;

template <class To, class From> __device__ __forceinline__ To bit_cast(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// A vector that is passed between TileLang's code and a template. It converts to any type of its
// size.
template <int bytes> struct Bits {
  Raw<bytes> raw;
  template <class T> __device__ __forceinline__ operator T() const { return bit_cast<T>(raw); }
};

// By value, so that a vector in memory is loaded at once; memcpy from a reference loads bytes.
template <class T> __device__ __forceinline__ Bits<sizeof(T)> bits(T value) {
  return {bit_cast<Raw<sizeof(T)>>(value)};
}
template <int bytes> __device__ __forceinline__ Bits<bytes> bits(Bits<bytes> value) {
  return value;
}

// Returns the bits of an operand for an element of type T. A scalar is converted to T first.
template <class T, class V> __device__ __forceinline__ Raw<sizeof(T)> raw(const V &value) {
  return bit_cast<Raw<sizeof(T)>>(static_cast<T>(value));
}
template <class T, int bytes> __device__ __forceinline__ Raw<bytes> raw(Bits<bytes> value) {
  return value.raw;
}

// Converts the result of an instruction to T, or to bits if it covers several elements.
template <class T, class R> __device__ __forceinline__ auto result(R raw) {
  if constexpr (sizeof(T) == sizeof(R)) {
    return bit_cast<T>(raw);
  } else {
    return Bits<sizeof(R)>{raw};
  }
}

} // namespace tw

// A call that returns a vector is lowered inside a ``tl.ldg``; codegen/lower.py gives the reason.
// These overloads of its printed form return their argument.
namespace tl {
__device__ __forceinline__ tw::Bits<4> load_global_32(tw::Bits<4> value) { return value; }
__device__ __forceinline__ tw::Bits<8> load_global_64(tw::Bits<8> value) { return value; }
__device__ __forceinline__ tw::Bits<16> load_global_128(tw::Bits<16> value) { return value; }
} // namespace tl
