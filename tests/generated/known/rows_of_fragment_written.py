"""A parallel loop writes rows of a fragment from row 25 on: other rows change."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_80", ("mark_statements", "verify_lowering")


@T.prim_func
def program(
    X2: T.Tensor((1, 48, 32), "float32"),
    O5: T.Tensor((1, 48, 32), "float32"),
):
    with T.Kernel(1, threads=128) as bx:
        a1 = T.alloc_shared((48, 32), "float32")
        f3 = T.alloc_fragment((48, 32), "float32")
        S = W.alloc_symmetric((1, 48, 32), "float32")
        f4 = T.alloc_fragment((48, 32), "float32")
        me = W.rank()
        T.copy(X2[bx, :, :], f3)
        T.copy(f3, a1)
        for i, j in T.Parallel(48, 32):
            S[(me + 1) % 2, bx, i, j] = a1[i, j]
        T.copy(S[me, bx, :, :], f4)
        for i, j in T.Parallel(12, 32):
            f4[i + 25, j] = 2
        T.copy(f4, O5[bx, :, :])
