// Atomic operations on global memory. Declarations: builtins/atomics.py. PTX ISA: atom, red.
#pragma once
#include "bits.cuh"
#include "qualifiers.cuh"

namespace tw {

namespace detail {

template <Op op, Type type> struct Rounding {
  static constexpr char value[] = "";
};
template <> struct Rounding<Op::add, Type::f16x2> {
  static constexpr char value[] = ".noftz";
};
template <> struct Rounding<Op::add, Type::bf16x2> {
  static constexpr char value[] = ".noftz";
};

template <Op op, Type type, Scope scope, Sem sem, class R>
__device__ __forceinline__ R atom(void *ref, R value) {
  R old;
  if constexpr (sizeof(R) == 4) {
    asm volatile("atom%3%4.global%5%6%7 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(ref), "r"(value), "C"(Text<sem>::value), "C"(Text<scope>::value),
                   "C"(Text<op>::value), "C"(Rounding<op, type>::value),
                   "C"(Text<ptx_type(op, type)>::value)
                 : "memory");
  } else {
    asm volatile("atom%3%4.global%5%6 %0, [%1], %2;"
                 : "=l"(old)
                 : "l"(ref), "l"(value), "C"(Text<sem>::value), "C"(Text<scope>::value),
                   "C"(Text<op>::value), "C"(Text<ptx_type(op, type)>::value)
                 : "memory");
  }
  return old;
}

template <Op op, Type type, Scope scope, Sem sem, class R>
__device__ __forceinline__ void red(void *ref, R value) {
  if constexpr (sizeof(R) == 4) {
    asm volatile("red%2%3.global%4%5%6 [%0], %1;"
                 :
                 : "l"(ref), "r"(value), "C"(Text<sem>::value), "C"(Text<scope>::value),
                   "C"(Text<op>::value), "C"(Rounding<op, type>::value),
                   "C"(Text<ptx_type(op, type)>::value)
                 : "memory");
  } else {
    asm volatile("red%2%3.global%4%5 [%0], %1;"
                 :
                 : "l"(ref), "l"(value), "C"(Text<sem>::value), "C"(Text<scope>::value),
                   "C"(Text<op>::value), "C"(Text<ptx_type(op, type)>::value)
                 : "memory");
  }
}

template <Scope scope, Sem sem, class R>
__device__ __forceinline__ R cas(void *ref, R compare, R value) {
  R old;
  if constexpr (sizeof(R) == 4) {
    asm volatile("atom%4%5.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(ref), "r"(compare), "r"(value), "C"(Text<sem>::value),
                   "C"(Text<scope>::value)
                 : "memory");
  } else {
    asm volatile("atom%4%5.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(old)
                 : "l"(ref), "l"(compare), "l"(value), "C"(Text<sem>::value),
                   "C"(Text<scope>::value)
                 : "memory");
  }
  return old;
}

} // namespace detail

#define TW_ATOM(NAME, OP)                                                                          \
  template <Type type, Scope scope, Sem sem, class T, class V>                                     \
  __device__ __forceinline__ auto NAME(T *ref, V value) {                                          \
    return result<T>(detail::atom<OP, type, scope, sem>(ref, raw<T>(value)));                      \
  }
TW_ATOM(atom_add, Op::add)
TW_ATOM(atom_min, Op::min)
TW_ATOM(atom_max, Op::max)
TW_ATOM(atom_and, Op::and_)
TW_ATOM(atom_or, Op::or_)
TW_ATOM(atom_xor, Op::xor_)
TW_ATOM(atom_exch, Op::exch)
#undef TW_ATOM

template <Type, Scope scope, Sem sem, class T, class C, class V>
__device__ __forceinline__ auto atom_cas(T *ref, C compare, V value) {
  return result<T>(detail::cas<scope, sem>(ref, raw<T>(compare), raw<T>(value)));
}

#define TW_RED(NAME, OP)                                                                           \
  template <Type type, Scope scope, Sem sem, class T, class V>                                     \
  __device__ __forceinline__ void NAME(T *ref, V value) {                                          \
    detail::red<OP, type, scope, sem>(ref, raw<T>(value));                                         \
  }
TW_RED(red_add, Op::add)
TW_RED(red_min, Op::min)
TW_RED(red_max, Op::max)
TW_RED(red_and, Op::and_)
TW_RED(red_or, Op::or_)
TW_RED(red_xor, Op::xor_)
#undef TW_RED

} // namespace tw
