# RUN: %python %s | %filecheck %s
"""Atomics refuse types, qualifiers and values without an instruction when they are traced."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def refuse(name, call, dtype="uint32"):
    print("TEST:", name)
    try:

        @T.prim_func
        def program(S: T.Tensor((64,), dtype)):
            with T.Kernel(1, threads=32):
                x = T.alloc_local((4,), dtype)
                T.evaluate(call(S, x))

    except tw.LanguageError as error:
        print(error)


# CHECK-LABEL: TEST: add_type
# CHECK: atom_add: S has type float16; expected uint32, int32, uint64, int64, float32, float64, float16x2, bfloat16x2
# LINE: CHECK-NEXT: --> {{.*}}atomics-refused.py:18
refuse("add_type", lambda S, x: W.atom_add(S[0], 1), "float16")

# CHECK-LABEL: TEST: add_lanes
# CHECK: red_add: S has type float16x4; expected uint32, int32, uint64, int64, float32, float64, float16x2, bfloat16x2
refuse("add_lanes", lambda S, x: W.red_add(S[0], x[0:4]), "float16")

# CHECK-LABEL: TEST: min_type
# CHECK: atom_min: S has type float32; expected uint32, int32, uint64, int64
refuse("min_type", lambda S, x: W.atom_min(S[0], 1.0), "float32")

# CHECK-LABEL: TEST: and_type
# CHECK: red_and: S has type float64; expected uint32, int32, uint64, int64
refuse("and_type", lambda S, x: W.red_and(S[0], 1), "float64")

# CHECK-LABEL: TEST: cas_type
# CHECK: atom_cas: S has type uint8; expected uint32, int32, uint64, int64, float32, float64, float16x2, bfloat16x2
refuse("cas_type", lambda S, x: W.atom_cas(S[0], 0, 1), "uint8")

# CHECK-LABEL: TEST: atom_sem
# CHECK: atom_or: sem='sc'; expected 'relaxed' or 'acquire' or 'release' or 'acq_rel'
refuse("atom_sem", lambda S, x: W.atom_or(S[0], 1, sem="sc"))

# CHECK-LABEL: TEST: red_sem
# CHECK: red_xor: sem='acquire'; expected 'relaxed' or 'release'
refuse("red_sem", lambda S, x: W.red_xor(S[0], 1, sem="acquire"))

# CHECK-LABEL: TEST: scope
# CHECK: atom_exch: scope='block'; expected 'cta' or 'gpu' or 'sys'
refuse("scope", lambda S, x: W.atom_exch(S[0], 1, scope="block"))

# CHECK-LABEL: TEST: fraction
# CHECK: atom_max: value=1.5; expected a value of type uint32
refuse("fraction", lambda S, x: W.atom_max(S[0], 1.5))

# CHECK-LABEL: TEST: compare_lanes
# CHECK: atom_cas: compare has type float16x2; expected type float16x4
refuse("compare_lanes", lambda S, x: W.atom_cas(S[0], x[0:2], x[0:4]), "float16")

# CHECK-LABEL: TEST: compare_scalar
# CHECK: atom_cas: compare has type float16; expected type float16x2
refuse("compare_scalar", lambda S, x: W.atom_cas(S[0], x[0], x[0:2]), "float16")

# CHECK-LABEL: TEST: memory
# CHECK: red_max: ref=x is in local memory; expected a global-memory tensor
refuse("memory", lambda S, x: W.red_max(x[0], 1))

# CHECK-LABEL: TEST: number
# CHECK: red_min: ref=3; expected an element of a global-memory tensor, such as S[i]
refuse("number", lambda S, x: W.red_min(3, 1))

# CHECK-LABEL: TEST: arguments
# CHECK: atom_add: missing a required argument: 'value'; expected atom_add(ref, value, *, scope='gpu', sem='relaxed')
refuse("arguments", lambda S, x: W.atom_add(S[0]))
