// Loads, stores, prefetches and fences with scope and semantics. Declarations: builtins/memory.py.
// PTX ISA: ld, st, prefetch, fence; memory consistency model.
#pragma once
#include "bits.cuh"
#include "qualifiers.cuh"

namespace tw {

namespace detail {

// A volatile access has no scope of its own.
template <Scope scope, Sem sem> struct ScopeText : Text<scope> {};
template <Scope scope> struct ScopeText<scope, Sem::volatile_> {
  static constexpr char value[] = "";
};

template <int bytes, Scope scope, Sem sem>
__device__ __forceinline__ Raw<bytes> load(const void *ref) {
  if constexpr (bytes == 1) {
    uint16_t value; // no constraint names an 8-bit register
    asm volatile("ld%2%3.global.b8 %0, [%1];"
                 : "=h"(value)
                 : "l"(ref), "C"(Text<sem>::value), "C"(ScopeText<scope, sem>::value)
                 : "memory");
    return static_cast<uint8_t>(value);
  } else if constexpr (bytes == 2) {
    uint16_t value;
    asm volatile("ld%2%3.global.b16 %0, [%1];"
                 : "=h"(value)
                 : "l"(ref), "C"(Text<sem>::value), "C"(ScopeText<scope, sem>::value)
                 : "memory");
    return value;
  } else if constexpr (bytes == 4) {
    uint32_t value;
    asm volatile("ld%2%3.global.b32 %0, [%1];"
                 : "=r"(value)
                 : "l"(ref), "C"(Text<sem>::value), "C"(ScopeText<scope, sem>::value)
                 : "memory");
    return value;
  } else if constexpr (bytes == 8) {
    uint64_t value;
    asm volatile("ld%2%3.global.b64 %0, [%1];"
                 : "=l"(value)
                 : "l"(ref), "C"(Text<sem>::value), "C"(ScopeText<scope, sem>::value)
                 : "memory");
    return value;
  } else {
    // b128, not v2.b64: a vector access may be torn between its elements.
    Raw128 value;
    asm volatile("{\n\t"
                 ".reg .b128 value;\n\t"
                 "ld%3%4.global.b128 value, [%2];\n\t"
                 "mov.b128 {%0, %1}, value;\n\t"
                 "}"
                 : "=l"(value.low), "=l"(value.high)
                 : "l"(ref), "C"(Text<sem>::value), "C"(ScopeText<scope, sem>::value)
                 : "memory");
    return value;
  }
}

template <Scope scope, Sem sem, class R> __device__ __forceinline__ void store(void *ref, R value) {
  if constexpr (sizeof(R) == 1) {
    asm volatile("st%2%3.global.b8 [%0], %1;"
                 :
                 : "l"(ref), "h"(static_cast<uint16_t>(value)), "C"(Text<sem>::value),
                   "C"(Text<scope>::value)
                 : "memory");
  } else if constexpr (sizeof(R) == 2) {
    asm volatile("st%2%3.global.b16 [%0], %1;"
                 :
                 : "l"(ref), "h"(value), "C"(Text<sem>::value), "C"(Text<scope>::value)
                 : "memory");
  } else if constexpr (sizeof(R) == 4) {
    asm volatile("st%2%3.global.b32 [%0], %1;"
                 :
                 : "l"(ref), "r"(value), "C"(Text<sem>::value), "C"(Text<scope>::value)
                 : "memory");
  } else if constexpr (sizeof(R) == 8) {
    asm volatile("st%2%3.global.b64 [%0], %1;"
                 :
                 : "l"(ref), "l"(value), "C"(Text<sem>::value), "C"(Text<scope>::value)
                 : "memory");
  } else {
    asm volatile("{\n\t"
                 ".reg .b128 value;\n\t"
                 "mov.b128 value, {%1, %2};\n\t"
                 "st%3%4.global.b128 [%0], value;\n\t"
                 "}"
                 :
                 : "l"(ref), "l"(value.low), "l"(value.high), "C"(Text<sem>::value),
                   "C"(Text<scope>::value)
                 : "memory");
  }
}

} // namespace detail

template <Scope scope, Sem sem, int lanes, class T>
__device__ __forceinline__ auto ld(const T *ref) {
  return result<T>(detail::load<sizeof(T) * lanes, scope, sem>(ref));
}

template <Scope scope, Sem sem, class T, class V>
__device__ __forceinline__ void st(T *ref, V value) {
  detail::store<scope, sem>(ref, raw<T>(value));
}

template <class T> __device__ __forceinline__ void prefetch(const T *ref) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(ref));
}

template <Scope scope, Sem sem> __device__ __forceinline__ void fence() {
  asm volatile("fence%0%1;" : : "C"(Text<sem>::value), "C"(Text<scope>::value) : "memory");
}

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" : : : "memory");
}

} // namespace tw
