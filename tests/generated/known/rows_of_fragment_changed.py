"""A parallel loop adds to rows of a fragment from row 21 on: other rows change."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_90a", ("mark_statements", "verify_lowering")


@T.prim_func
def program(
    O3: T.Tensor((2, 48, 128), "float32"),
):
    with T.Kernel(2, threads=128) as bx:
        a1 = T.alloc_shared((48, 128), "float32")
        S = W.alloc_symmetric((2, 48, 128), "float32")
        f2 = T.alloc_fragment((48, 128), "float32")
        me = W.rank()
        T.clear(a1)
        for i, j in T.Parallel(48, 128):
            S[(me + 1) % 2, bx, i, j] = a1[i, j]
        T.copy(S[me, bx, :, :], f2)
        for i, j in T.Parallel(26, 128):
            f2[i + 21, j] = f2[i + 21, j] + 1
        T.copy(f2, O3[bx, :, :])
