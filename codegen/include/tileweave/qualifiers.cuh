// Qualifiers of builtins as enumerators, named as in PTX; see builtins/declaration/qualifiers.py.
#pragma once
#include <stdint.h>

namespace tw {

enum class Scope { cta, gpu, sys };
enum class Sem { relaxed, acquire, release, acq_rel, sc, volatile_ };
enum class Op { add, set, min, max, and_, or_, xor_, exch };
enum class Type { u32, s32, u64, s64, f32, f64, f16, bf16, f16x2, bf16x2, b32, b64 };

// Text of a qualifier in PTX, for operands with constraint "C" of inline PTX.
template <auto qualifier> struct Text;
#define TW_TEXT(QUALIFIER, TEXT)                                                                   \
  template <> struct Text<QUALIFIER> {                                                             \
    static constexpr char value[] = TEXT;                                                          \
  };
TW_TEXT(Scope::cta, ".cta")
TW_TEXT(Scope::gpu, ".gpu")
TW_TEXT(Scope::sys, ".sys")
TW_TEXT(Sem::relaxed, ".relaxed")
TW_TEXT(Sem::acquire, ".acquire")
TW_TEXT(Sem::release, ".release")
TW_TEXT(Sem::acq_rel, ".acq_rel")
TW_TEXT(Sem::sc, ".sc")
TW_TEXT(Sem::volatile_, ".volatile")
TW_TEXT(Op::add, ".add")
TW_TEXT(Op::min, ".min")
TW_TEXT(Op::max, ".max")
TW_TEXT(Op::and_, ".and")
TW_TEXT(Op::or_, ".or")
TW_TEXT(Op::xor_, ".xor")
TW_TEXT(Op::exch, ".exch")
TW_TEXT(Type::u32, ".u32")
TW_TEXT(Type::s32, ".s32")
TW_TEXT(Type::u64, ".u64")
TW_TEXT(Type::s64, ".s64")
TW_TEXT(Type::f32, ".f32")
TW_TEXT(Type::f64, ".f64")
TW_TEXT(Type::f16x2, ".f16x2")
TW_TEXT(Type::bf16x2, ".bf16x2")
TW_TEXT(Type::b32, ".b32")
TW_TEXT(Type::b64, ".b64")
#undef TW_TEXT

__host__ __device__ constexpr bool is_pair(Type type) {
  return type == Type::f16x2 || type == Type::bf16x2;
}

__host__ __device__ constexpr bool is_wide(Type type) {
  return type == Type::u64 || type == Type::s64 || type == Type::f64 || type == Type::b64;
}

// Returns the type of an operation in PTX. Bitwise operations and exchanges have only widths. s64
// is added as u64, which yields the same bits.
__host__ __device__ constexpr Type ptx_type(Op op, Type type) {
  if (op == Op::and_ || op == Op::or_ || op == Op::xor_ || op == Op::exch) {
    return is_wide(type) ? Type::b64 : Type::b32;
  }
  return op == Op::add && type == Type::s64 ? Type::u64 : type;
}

// Expands to STATEMENT("scope") for the template parameter Scope S, because inline PTX needs its
// qualifiers as literals.
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
