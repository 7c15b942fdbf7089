// Words of the LL protocol: 4 bytes of data and a 4-byte flag. Declarations: builtins/signals.py.
// PTX ISA: st, ld; memory consistency model, Memory Operations on Vector Data Types, Atomicity.
#pragma once
#include "bits.cuh"
#include "context.cuh"
#include "qualifiers.cuh"
#include "signals.cuh"

namespace tw {

namespace detail {

// The elements of a v2.b64 access are two atomic operations of 8 bytes. Those of a v4.b32 access
// would be four operations without order.
#define TW_LL_STORE(SCOPE)                                                                         \
  if constexpr (words == 1) {                                                                      \
    asm volatile("st.relaxed." SCOPE ".global.b64 [%0], %1;" : : "l"(ref), "l"(first) : "memory"); \
  } else {                                                                                         \
    asm volatile("st.relaxed." SCOPE ".global.v2.b64 [%0], {%1, %2};"                              \
                 :                                                                                 \
                 : "l"(ref), "l"(first), "l"(second)                                               \
                 : "memory");                                                                      \
  }
#define TW_LL_LOAD(SCOPE)                                                                          \
  if constexpr (words == 1) {                                                                      \
    asm volatile("ld.relaxed." SCOPE ".global.b64 %0, [%1];"                                       \
                 : "=l"(word[0])                                                                   \
                 : "l"(ref)                                                                        \
                 : "memory");                                                                      \
  } else {                                                                                         \
    asm volatile("ld.relaxed." SCOPE ".global.v2.b64 {%0, %1}, [%2];"                              \
                 : "=l"(word[0]), "=l"(word[1])                                                    \
                 : "l"(ref)                                                                        \
                 : "memory");                                                                      \
  }

template <Scope scope, int words>
__device__ __forceinline__ void ll_load(const uint64_t *ref, uint64_t (&word)[words]) {
  TW_FOR_SCOPE(scope, TW_LL_LOAD);
}

template <Scope scope, int words>
__device__ __forceinline__ void ll_store(uint64_t *ref, uint64_t first, uint64_t second) {
  TW_FOR_SCOPE(scope, TW_LL_STORE);
}

#undef TW_LL_STORE
#undef TW_LL_LOAD

__device__ __forceinline__ uint64_t ll_word(uint32_t data, uint32_t flag) {
  return static_cast<uint64_t>(flag) << 32 | data;
}

__device__ __forceinline__ uint32_t ll_flag(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}

// Returns the first word without the flag, or the last one if all have it.
template <int words>
__device__ __forceinline__ uint64_t ll_missing(const uint64_t (&word)[words], uint32_t flag) {
  return words == 1 || ll_flag(word[0]) != flag ? word[0] : word[words - 1];
}

} // namespace detail

template <Scope scope, class V>
__device__ __forceinline__ void ll_st(uint64_t *ref, V value, uint32_t flag) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8, "ll_st: expected 4 or 8 bytes");
  if constexpr (sizeof(V) == 4) {
    detail::ll_store<scope, 1>(ref, detail::ll_word(bit_cast<uint32_t>(value), flag), 0);
  } else {
    const uint64_t data = bit_cast<uint64_t>(value);
    detail::ll_store<scope, 2>(ref, detail::ll_word(static_cast<uint32_t>(data), flag),
                               detail::ll_word(static_cast<uint32_t>(data >> 32), flag));
  }
}

template <Scope scope, int words>
__device__ __forceinline__ Bits<4 * words> ll_ld(const uint64_t *ref, uint32_t flag, int32_t peer,
                                                 int64_t context, int32_t loc) {
  const Context *c = reinterpret_cast<const Context *>(context);
  uint64_t word[words];
  for (uint64_t start = 0;;) {
#pragma unroll 1
    for (int i = 0; i < detail::kPollsPerClock; ++i) {
      detail::ll_load<scope, words>(ref, word);
      if (detail::ll_flag(detail::ll_missing(word, flag)) == flag) {
        if constexpr (words == 1) {
          return {static_cast<uint32_t>(word[0])};
        } else {
          return {word[1] << 32 | static_cast<uint32_t>(word[0])};
        }
      }
    }
    const uint64_t now = now_ns();
    if (start == 0) {
      start = now;
    } else if (c->timeout_ns != 0 && now - start > c->timeout_ns) {
      const uint64_t seen = detail::ll_missing(word, flag);
      const int which = words == 2 && seen == word[words - 1] ? 1 : 0;
      give_up(c, loc, peer, reinterpret_cast<uint64_t>(ref + which), flag, detail::ll_flag(seen));
      __builtin_unreachable();
    }
  }
}

} // namespace tw
