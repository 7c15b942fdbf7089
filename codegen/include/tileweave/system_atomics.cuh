// TileLang's T.atomic_* at system scope, for symmetric tensors. passes/device/make_coherent.py
// inserts the calls. PTX ISA: atom, red, fence; memory consistency model.
#pragma once
#include "atomics.cuh"
#include "bits.cuh"
#include "memory.cuh"
#include "qualifiers.cuh"

namespace tw {
namespace system {

// Numbers of the memory orders in C++ and TileLang.
inline constexpr int consume = 1, acquire = 2, release = 3, acq_rel = 4, seq_cst = 5;

template <int order> __device__ __forceinline__ void fence_before() {
  if constexpr (order == seq_cst) {
    asm volatile("fence.sc.sys;" ::: "memory");
  } else if constexpr (order == release || order == acq_rel) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
}

template <int order> __device__ __forceinline__ void fence_after() {
  if constexpr (order != 0 && order != release) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
}

namespace detail {

inline constexpr Scope sys = Scope::sys;
inline constexpr Sem relaxed = Sem::relaxed;

__host__ __device__ constexpr bool is_half(Type type) {
  return type == Type::f16 || type == Type::bf16;
}

template <class R> __device__ __forceinline__ R compare_and_swap(void *ref, R compare, R value) {
  if constexpr (sizeof(R) == 2) {
    R old;
    asm volatile("atom.relaxed.sys.global.cas.b16 %0, [%1], %2, %3;"
                 : "=h"(old)
                 : "l"(ref), "h"(compare), "h"(value)
                 : "memory");
    return old;
  } else {
    return ::tw::detail::cas<sys, relaxed>(ref, compare, value);
  }
}

// Replaces an element by f(element) for operations without an instruction. Returns the old value.
template <class T, class F> __device__ __forceinline__ T replace(T *ref, F f) {
  using R = Raw<sizeof(T)>;
  R old = ::tw::detail::load<sizeof(T), sys, relaxed>(ref);
  while (true) {
    const R seen = compare_and_swap(ref, old, bit_cast<R>(f(bit_cast<T>(old))));
    if (seen == old) {
      return bit_cast<T>(old);
    }
    old = seen;
  }
}

template <Type type, class T> __device__ __forceinline__ T add_half(T *ref, T value) {
  uint16_t old;
  if constexpr (type == Type::f16) {
    asm volatile("atom.relaxed.sys.global.add.noftz.f16 %0, [%1], %2;"
                 : "=h"(old)
                 : "l"(ref), "h"(bit_cast<uint16_t>(value))
                 : "memory");
    return bit_cast<T>(old);
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("atom.relaxed.sys.global.add.noftz.bf16 %0, [%1], %2;"
                 : "=h"(old)
                 : "l"(ref), "h"(bit_cast<uint16_t>(value))
                 : "memory");
    return bit_cast<T>(old);
#else
    return replace(ref, [value](T before) { return static_cast<T>(before + value); });
#endif
  }
}

// T without const, because TileLang marks parameters that a kernel only reads.
template <class T> struct Mutable {
  using type = T;
};
template <class T> struct Mutable<const T> {
  using type = T;
};

// The elements of a vector, or of an array, converted to the type of the tensor.
template <int lanes, class T, class V> struct Elements {
  T values[lanes];
  __device__ __forceinline__ explicit Elements(const V &value) {
    if constexpr (sizeof(V) == lanes * sizeof(T)) {
      memcpy(values, &value, sizeof(values));
    } else {
      static_assert(sizeof(V) == lanes * sizeof(float), "Elements: expected T or float");
      float wide[lanes];
      memcpy(wide, &value, sizeof(wide));
      for (int i = 0; i < lanes; ++i) {
        values[i] = static_cast<T>(wide[i]);
      }
    }
  }
};
template <int lanes, class T, class V> struct Elements<lanes, T, V *> {
  T values[lanes];
  __device__ __forceinline__ explicit Elements(V *source) {
    for (int i = 0; i < lanes; ++i) {
      values[i] = static_cast<T>(source[i]);
    }
  }
};

template <Type type, class T> __device__ __forceinline__ void add_pair(T *ref, const T *value) {
  constexpr Type pair = type == Type::f16 ? Type::f16x2 : Type::bf16x2;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
  if constexpr (type == Type::bf16) {
    add_half<type>(ref, value[0]);
    add_half<type>(ref + 1, value[1]);
    return;
  }
#endif
  uint32_t packed;
  memcpy(&packed, value, sizeof(packed));
  ::tw::detail::red<Op::add, pair, sys, relaxed>(ref, packed);
}

template <int lanes> __device__ __forceinline__ void add_floats(float *ref, const float *value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (lanes == 2) {
    asm volatile("red.relaxed.sys.global.add.v2.f32 [%0], {%1, %2};"
                 :
                 : "l"(ref), "f"(value[0]), "f"(value[1])
                 : "memory");
  } else {
    asm volatile("red.relaxed.sys.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(ref), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
                 : "memory");
  }
#else
  for (int i = 0; i < lanes; ++i) {
    ::tw::detail::red<Op::add, Type::f32, sys, relaxed>(ref + i, bit_cast<uint32_t>(value[i]));
  }
#endif
}

} // namespace detail

template <Type type, int order, class T, class V>
__device__ __forceinline__ T atomic_add_ret(T *ref, V value) {
  fence_before<order>();
  T old;
  if constexpr (detail::is_half(type)) {
    old = detail::add_half<type>(ref, static_cast<T>(value));
  } else {
    old = bit_cast<T>(
        ::tw::detail::atom<Op::add, type, detail::sys, detail::relaxed>(ref, raw<T>(value)));
  }
  fence_after<order>();
  return old;
}

template <Type type, int order, class T, class V>
__device__ __forceinline__ void atomic_add(T *ref, V value) {
  if constexpr (detail::is_half(type)) {
    atomic_add_ret<type, order>(ref, value);
  } else {
    fence_before<order>();
    ::tw::detail::red<Op::add, type, detail::sys, detail::relaxed>(ref, raw<T>(value));
    fence_after<order>();
  }
}

// PTX has no instruction for the minimum and maximum of floating-point numbers.
#define TW_SYSTEM_EXTREME(NAME, OP, BETTER)                                                        \
  template <Type type, int order, class T, class V>                                                \
  __device__ __forceinline__ T NAME##_ret(T *ref, V value) {                                       \
    fence_before<order>();                                                                         \
    T old;                                                                                         \
    if constexpr (detail::is_half(type) || type == Type::f32 || type == Type::f64) {               \
      const T own = static_cast<T>(value);                                                         \
      old = detail::replace(ref, [own](T before) { return own BETTER before ? own : before; });    \
    } else {                                                                                       \
      old = bit_cast<T>(                                                                           \
          ::tw::detail::atom<OP, type, detail::sys, detail::relaxed>(ref, raw<T>(value)));         \
    }                                                                                              \
    fence_after<order>();                                                                          \
    return old;                                                                                    \
  }                                                                                                \
  template <Type type, int order, class T, class V>                                                \
  __device__ __forceinline__ void NAME(T *ref, V value) {                                          \
    NAME##_ret<type, order>(ref, value);                                                           \
  }
TW_SYSTEM_EXTREME(atomic_max, Op::max, >)
TW_SYSTEM_EXTREME(atomic_min, Op::min, <)
#undef TW_SYSTEM_EXTREME

template <Type type, int order, class T, class V>
__device__ __forceinline__ void atomic_or(T *ref, V value) {
  fence_before<order>();
  ::tw::detail::red<Op::or_, type, detail::sys, detail::relaxed>(ref, raw<T>(value));
  fence_after<order>();
}

template <Type, int order, class T> __device__ __forceinline__ auto atomic_load(T *ref) {
  if constexpr (order == seq_cst) {
    fence_before<order>();
  }
  const auto raw = ::tw::detail::load<sizeof(T), detail::sys, detail::relaxed>(ref);
  fence_after<order>();
  return bit_cast<typename detail::Mutable<T>::type>(raw);
}

template <Type, int order, class T, class V>
__device__ __forceinline__ void atomic_store(T *ref, V value) {
  fence_before<order>();
  ::tw::detail::store<detail::sys, detail::relaxed>(ref, raw<T>(value));
}

// Adds several elements, each of them atomically.
template <Type type, int order, int lanes, class T, class V>
__device__ __forceinline__ void atomic_add_vector(T *ref, V value) {
  const detail::Elements<lanes, T, V> elements(value);
  fence_before<order>();
  if constexpr (type == Type::f32) {
    detail::add_floats<lanes>(ref, elements.values);
  } else {
    for (int i = 0; i < lanes; i += 2) {
      detail::add_pair<type>(ref + i, elements.values + i);
    }
  }
  fence_after<order>();
}
template <Type type, int order, class T, class V>
__device__ __forceinline__ void atomic_addx2(T *ref, V value) {
  atomic_add_vector<type, order, 2>(ref, value);
}
template <Type type, int order, class T, class V>
__device__ __forceinline__ void atomic_addx4(T *ref, V value) {
  atomic_add_vector<type, order, 4>(ref, value);
}

} // namespace system
} // namespace tw
