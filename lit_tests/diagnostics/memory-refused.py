# RUN: %python %s | %filecheck %s
"""Loads, stores and fences refuse widths, qualifiers and values without an instruction."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def refuse(name, call, dtype="float32"):
    print("TEST:", name)
    try:

        @T.prim_func
        def program(S: T.Tensor((64,), dtype), n: T.int32):
            with T.Kernel(1, threads=32):
                x = T.alloc_local((16,), dtype)
                T.evaluate(call(S, x, n))

    except tw.LanguageError as error:
        print(error)


# CHECK-LABEL: TEST: ld_wide
# CHECK: ld: S has type float32, and an access of 8 lanes has 256 bits; expected an element of 8, 16, 32 or 64 bits, or a vector of 32, 64 or 128 bits
# LINE: CHECK-NEXT: --> {{.*}}memory-refused.py:18
refuse("ld_wide", lambda S, x, n: W.ld(S[0], 8))

# CHECK-LABEL: TEST: ld_odd
# CHECK: ld: S has type uint8, and an access of 3 lanes has 24 bits; expected
refuse("ld_odd", lambda S, x, n: W.ld(S[0], 3), "uint8")

# CHECK-LABEL: TEST: ld_none
# CHECK: ld: S has type float32, and an access of 0 lanes has 0 bits; expected
refuse("ld_none", lambda S, x, n: W.ld(S[0], 0))

# CHECK-LABEL: TEST: ld_nibble
# CHECK: ld: S has type float4_e2m1fn, and an access of 1 lane has 4 bits; expected
refuse("ld_nibble", lambda S, x, n: W.ld(S[0]), "float4_e2m1fn")

# CHECK-LABEL: TEST: ld_variable
# CHECK: ld: lanes=n; expected a Python integer
refuse("ld_variable", lambda S, x, n: W.ld(S[0], n))

# CHECK-LABEL: TEST: ld_sem
# CHECK: ld: sem='release'; expected 'relaxed' or 'acquire' or 'volatile'
refuse("ld_sem", lambda S, x, n: W.ld(S[0], sem="release"))

# CHECK-LABEL: TEST: ld_scope
# CHECK: ld: scope='system'; expected 'cta' or 'gpu' or 'sys'
refuse("ld_scope", lambda S, x, n: W.ld(S[0], scope="system"))

# CHECK-LABEL: TEST: ld_memory
# CHECK: ld: ref=x is in local memory; expected a global-memory tensor
refuse("ld_memory", lambda S, x, n: W.ld(x[0]))

# CHECK-LABEL: TEST: st_wide
# CHECK: st: S has type float32, and an access of 16 lanes has 512 bits; expected
refuse("st_wide", lambda S, x, n: W.st(S[0], x[0:16]))

# CHECK-LABEL: TEST: st_sem
# CHECK: st: sem='acquire'; expected 'relaxed' or 'release'
refuse("st_sem", lambda S, x, n: W.st(S[0], 1.0, sem="acquire"))

# CHECK-LABEL: TEST: st_value
# CHECK: st: value='1'; expected a value of type float32
refuse("st_value", lambda S, x, n: W.st(S[0], "1"))

# CHECK-LABEL: TEST: fence_sem
# CHECK: fence: sem='acquire'; expected 'acq_rel' or 'sc'
refuse("fence_sem", lambda S, x, n: W.fence("sys", "acquire"))

# CHECK-LABEL: TEST: fence_scope
# CHECK: fence: missing a required argument: 'scope'; expected fence(scope, sem='acq_rel')
refuse("fence_scope", lambda S, x, n: W.fence())
