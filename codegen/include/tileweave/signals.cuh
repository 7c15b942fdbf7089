// Flags between ranks. Declarations: builtins/signals.py.
// PTX ISA: red, st, ld; memory consistency model, release and acquire patterns.
#pragma once
#include "context.cuh"
#include "qualifiers.cuh"

namespace tw {

namespace detail {

template <class T> __device__ __forceinline__ uint64_t widen(T value) {
  return static_cast<uint64_t>(value); // sign-extends s32, so that the host can read it back
}

#define TW_LOAD(WORDS)                                                                             \
  if constexpr (sizeof(T) == 4) {                                                                  \
    asm volatile("ld." WORDS ".global.b32 %0, [%1];" : "=r"(low) : "l"(flag) : "memory");          \
  } else {                                                                                         \
    asm volatile("ld." WORDS ".global.b64 %0, [%1];" : "=l"(wide) : "l"(flag) : "memory");         \
  }
#define TW_LOAD_ACQUIRE(SCOPE) TW_LOAD("acquire." SCOPE)
#define TW_LOAD_RELAXED(SCOPE) TW_LOAD("relaxed." SCOPE)

template <Scope scope, Sem sem, class T> __device__ __forceinline__ T load_flag(const T *flag) {
  uint32_t low = 0;
  uint64_t wide = 0;
  if constexpr (sem == Sem::acquire) {
    TW_FOR_SCOPE(scope, TW_LOAD_ACQUIRE);
  } else {
    static_assert(sem == Sem::relaxed, "load_flag: expected relaxed or acquire");
    TW_FOR_SCOPE(scope, TW_LOAD_RELAXED);
  }
  if constexpr (sizeof(T) == 4) {
    return static_cast<T>(low);
  } else {
    return static_cast<T>(wide);
  }
}

#undef TW_LOAD
#undef TW_LOAD_ACQUIRE
#undef TW_LOAD_RELAXED

// Polls between two readings of the clock, because a reading delays the next poll.
constexpr int kPollsPerClock = 256;

// Polls until done(seen, value), or until the timeout.
template <Scope scope, Sem sem, class T, class Done>
__device__ __forceinline__ void poll(const T *flag, T value, int32_t peer, int64_t context,
                                     int32_t loc, Done done) {
  const Context *c = reinterpret_cast<const Context *>(context);
  for (uint64_t start = 0;;) {
#pragma unroll 1
    for (int i = 0; i < kPollsPerClock; ++i) {
      if (done(load_flag<scope, sem>(flag), value)) {
        return;
      }
    }
    const uint64_t now = now_ns();
    if (start == 0) {
      start = now;
    } else if (c->timeout_ns != 0 && now - start > c->timeout_ns) {
      const T seen = load_flag<scope, sem>(flag);
      if (done(seen, value)) {
        return;
      }
      give_up(c, loc, peer, reinterpret_cast<uint64_t>(flag), widen(value), widen(seen));
      // The call does not return: no register needs to survive it, also in loops without waits.
      __builtin_unreachable();
    }
  }
}

#define TW_SIGNAL(INSTRUCTION)                                                                     \
  if constexpr (sizeof(T) == 4) {                                                                  \
    asm volatile(INSTRUCTION "32 [%0], %1;"                                                        \
                 :                                                                                 \
                 : "l"(flag), "r"(static_cast<uint32_t>(value))                                    \
                 : "memory");                                                                      \
  } else {                                                                                         \
    asm volatile(INSTRUCTION "64 [%0], %1;"                                                        \
                 :                                                                                 \
                 : "l"(flag), "l"(static_cast<uint64_t>(value))                                    \
                 : "memory");                                                                      \
  }
#define TW_ADD_RELEASE(SCOPE) TW_SIGNAL("red.release." SCOPE ".global.add.u")
#define TW_ADD_RELAXED(SCOPE) TW_SIGNAL("red.relaxed." SCOPE ".global.add.u")
#define TW_SET_RELEASE(SCOPE) TW_SIGNAL("st.release." SCOPE ".global.b")
#define TW_SET_RELAXED(SCOPE) TW_SIGNAL("st.relaxed." SCOPE ".global.b")

} // namespace detail

template <Type, Op op, Scope scope, Sem sem, class T, class V>
__device__ __forceinline__ void signal(T *flag, V value) {
  if constexpr (op == Op::add && sem == Sem::release) {
    TW_FOR_SCOPE(scope, TW_ADD_RELEASE);
  } else if constexpr (op == Op::add) {
    TW_FOR_SCOPE(scope, TW_ADD_RELAXED);
  } else if constexpr (sem == Sem::release) {
    TW_FOR_SCOPE(scope, TW_SET_RELEASE);
  } else {
    TW_FOR_SCOPE(scope, TW_SET_RELAXED);
  }
}

#undef TW_SIGNAL
#undef TW_ADD_RELEASE
#undef TW_ADD_RELAXED
#undef TW_SET_RELEASE
#undef TW_SET_RELAXED

#define TW_WAIT(NAME, CONDITION)                                                                   \
  template <Type, Scope scope, Sem sem, class T, class V>                                          \
  __device__ __forceinline__ void NAME(const T *flag, V value, int32_t peer, int64_t context,      \
                                       int32_t loc) {                                              \
    detail::poll<scope, sem>(flag, static_cast<T>(value), peer, context, loc,                      \
                             [](T seen, T value) { return CONDITION; });                           \
  }

TW_WAIT(wait_eq, seen == value)
TW_WAIT(wait_ne, seen != value)
TW_WAIT(wait_ge, seen >= value)
TW_WAIT(wait_gt, seen > value)
TW_WAIT(wait_le, seen <= value)
TW_WAIT(wait_lt, seen < value)
// Compares the signed difference, so that a counter may wrap around.
TW_WAIT(wait_reached,
        sizeof(T) == 4
            ? static_cast<int32_t>(static_cast<uint32_t>(seen) - static_cast<uint32_t>(value)) >= 0
            : static_cast<int64_t>(static_cast<uint64_t>(seen) - static_cast<uint64_t>(value)) >= 0)

#undef TW_WAIT

} // namespace tw
