// Multicast memory. Declarations: builtins/multimem.py. PTX ISA: multimem.
#pragma once
#include "bits.cuh"
#include "qualifiers.cuh"

namespace tw {

namespace detail {

template <Op op, Type type> struct Accumulate {
  static constexpr char value[] = "";
};
template <> struct Accumulate<Op::add, Type::f16x2> {
  static constexpr char value[] = ".acc::f32";
};
template <> struct Accumulate<Op::add, Type::bf16x2> {
  static constexpr char value[] = ".acc::f32";
};

// Stores of integers use a type of their width, because PTX has no vectors of integers.
__host__ __device__ constexpr Type stored_type(Type type) {
  return type == Type::f32 || type == Type::f64 || is_pair(type) ? type : ptx_type(Op::exch, type);
}

// Low and high words of values of 8 and 16 bytes, which vectors of 32-bit registers hold.
__device__ __forceinline__ uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }
__device__ __forceinline__ uint32_t high(uint64_t value) {
  return static_cast<uint32_t>(value >> 32);
}
__device__ __forceinline__ uint64_t join(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

#define TW_QUALIFIERS                                                                              \
  "C"(Text<sem>::value), "C"(Text<scope>::value), "C"(Text<op>::value),                            \
      "C"(Accumulate<op, type>::value), "C"(Text<ptx_type(op, type)>::value)

template <Type type, Op op, Scope scope, Sem sem, int bytes>
__device__ __forceinline__ Raw<bytes> multimem_load(const void *ref) {
  if constexpr (bytes == 4) {
    uint32_t a;
    asm volatile("multimem.ld_reduce%2%3.global%4%5%6 %0, [%1];"
                 : "=r"(a)
                 : "l"(ref), TW_QUALIFIERS
                 : "memory");
    return a;
  } else if constexpr (is_wide(type)) {
    uint64_t a;
    asm volatile("multimem.ld_reduce%2%3.global%4%5%6 %0, [%1];"
                 : "=l"(a)
                 : "l"(ref), TW_QUALIFIERS
                 : "memory");
    return a;
  } else if constexpr (bytes == 8) {
    uint32_t a, b;
    asm volatile("multimem.ld_reduce%3%4.global%5%6.v2%7 {%0, %1}, [%2];"
                 : "=r"(a), "=r"(b)
                 : "l"(ref), TW_QUALIFIERS
                 : "memory");
    return join(a, b);
  } else {
    uint32_t a, b, c, d;
    asm volatile("multimem.ld_reduce%5%6.global%7%8.v4%9 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(ref), TW_QUALIFIERS
                 : "memory");
    return {join(a, b), join(c, d)};
  }
}

#undef TW_QUALIFIERS

// Body of `multimem.st` and `multimem.red`: an instruction with a value and without a result.
#define TW_WRITE(INSTRUCTION, OP, KIND)                                                            \
  if constexpr (sizeof(R) == 4) {                                                                  \
    asm volatile(INSTRUCTION "%2%3.global%4%5 [%0], %1;"                                           \
                 :                                                                                 \
                 : "l"(ref), "r"(value), "C"(Text<sem>::value), "C"(Text<scope>::value), "C"(OP),  \
                   "C"(KIND)                                                                       \
                 : "memory");                                                                      \
  } else if constexpr (is_wide(type)) {                                                            \
    asm volatile(INSTRUCTION "%2%3.global%4%5 [%0], %1;"                                           \
                 :                                                                                 \
                 : "l"(ref), "l"(value), "C"(Text<sem>::value), "C"(Text<scope>::value), "C"(OP),  \
                   "C"(KIND)                                                                       \
                 : "memory");                                                                      \
  } else if constexpr (sizeof(R) == 8) {                                                           \
    asm volatile(INSTRUCTION "%3%4.global%5.v2%6 [%0], {%1, %2};"                                  \
                 :                                                                                 \
                 : "l"(ref), "r"(low(value)), "r"(high(value)), "C"(Text<sem>::value),             \
                   "C"(Text<scope>::value), "C"(OP), "C"(KIND)                                     \
                 : "memory");                                                                      \
  } else {                                                                                         \
    asm volatile(INSTRUCTION "%5%6.global%7.v4%8 [%0], {%1, %2, %3, %4};"                          \
                 :                                                                                 \
                 : "l"(ref), "r"(low(value.low)), "r"(high(value.low)), "r"(low(value.high)),      \
                   "r"(high(value.high)), "C"(Text<sem>::value), "C"(Text<scope>::value), "C"(OP), \
                   "C"(KIND)                                                                       \
                 : "memory");                                                                      \
  }

struct NoOperation {
  static constexpr char value[] = "";
};

template <Type type, Scope scope, Sem sem, class R>
__device__ __forceinline__ void multimem_store(void *ref, R value) {
  using Kind = Text<stored_type(type)>;
  TW_WRITE("multimem.st", NoOperation::value, Kind::value)
}

template <Type type, Op op, Scope scope, Sem sem, class R>
__device__ __forceinline__ void multimem_reduce(void *ref, R value) {
  using Kind = Text<ptx_type(op, type)>;
  TW_WRITE("multimem.red", Text<op>::value, Kind::value)
}

#undef TW_WRITE

} // namespace detail

template <Type type, Op op, Scope scope, Sem sem, int lanes, class T>
__device__ __forceinline__ auto multimem_ld_reduce(const T *ref) {
  return result<T>(detail::multimem_load<type, op, scope, sem, sizeof(T) * lanes>(ref));
}

template <Type type, Scope scope, Sem sem, class T, class V>
__device__ __forceinline__ void multimem_st(T *ref, V value) {
  detail::multimem_store<type, scope, sem>(ref, raw<T>(value));
}

template <Type type, Op op, Scope scope, Sem sem, class T, class V>
__device__ __forceinline__ void multimem_red(T *ref, V value) {
  detail::multimem_reduce<type, op, scope, sem>(ref, raw<T>(value));
}

} // namespace tw
