# RUN: %python %s | %filecheck %s
"""Words of the LL protocol refuse other tensors, sizes of data and numbers of words."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def refuse(name, call, dtype="uint64"):
    print("TEST:", name)
    try:

        @T.prim_func
        def program(S: T.Tensor((64,), dtype), n: T.uint32):
            with T.Kernel(1, threads=32):
                x = T.alloc_local((16,), "float32")
                T.evaluate(call(S, x, n))

    except tw.LanguageError as error:
        print(error)


# CHECK-LABEL: TEST: store_type
# CHECK: ll_st: S has type float32; expected a tensor of uint64 words
# LINE: CHECK-NEXT: --> {{.*}}signals-ll.py:18
refuse("store_type", lambda S, x, n: W.ll_st(S[0], x[0], n), "float32")

# CHECK-LABEL: TEST: load_type
# CHECK: ll_ld: S has type uint32; expected a tensor of uint64 words
refuse("load_type", lambda S, x, n: W.ll_ld(S[0], n), "uint32")

# CHECK-LABEL: TEST: too_wide
# CHECK: ll_st: value has type float32x4; expected a scalar or vector of 4 or 8 bytes
refuse("too_wide", lambda S, x, n: W.ll_st(S[0], x[0:4], n))

# CHECK-LABEL: TEST: literal
# CHECK: ll_st: value=1.0; expected a value with a type
refuse("literal", lambda S, x, n: W.ll_st(S[0], 1.0, n))

# CHECK-LABEL: TEST: words
# CHECK: ll_ld: words=4; expected 1 or 2
refuse("words", lambda S, x, n: W.ll_ld(S[0], n, words=4))

# CHECK-LABEL: TEST: data_type
# CHECK: ll_ld: dtype='float64', words=1; expected a type of at most 4 bytes, or of 8 bytes for two words
refuse("data_type", lambda S, x, n: W.ll_ld(S[0], n, dtype="float64"))

# CHECK-LABEL: TEST: flag
# CHECK: ll_st: flag={{.*}} has type float32; expected an integer
refuse("flag", lambda S, x, n: W.ll_st(S[0], x[0], x[1]))
