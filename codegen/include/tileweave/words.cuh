// The words of the language as enumerators: PTX's own, see builtins/words.py.
#pragma once
#include <stdint.h>

namespace tw {

enum class Scope { cta, gpu, sys };
enum class Sem { relaxed, acquire, release, acq_rel, sc, volatile_ };
enum class Op { add, set, min, max, and_, or_, xor_ };
enum class Type { u32, s32, u64, s64, f32, f64, f16, bf16, f16x2, bf16x2 };

// Fails to compile, and only when instantiated: for words that a declaration lets through by
// mistake.
template <class...> inline constexpr bool illegal = false;

// Runs STATEMENT(scope word) for the template parameter Scope S: inline PTX needs its words as
// literals.
#define TW_FOR_SCOPE(S, STATEMENT)                                                                 \
  do {                                                                                             \
    if constexpr (S == ::tw::Scope::cta) {                                                         \
      STATEMENT("cta");                                                                            \
    } else if constexpr (S == ::tw::Scope::gpu) {                                                  \
      STATEMENT("gpu");                                                                            \
    } else {                                                                                       \
      STATEMENT("sys");                                                                            \
    }                                                                                              \
  } while (0)

} // namespace tw
