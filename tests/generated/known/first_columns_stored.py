"""The first columns of a tile are stored: one bulk copy, as if they were the whole tile."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 3, "sm_90a", ("mark_statements", "verify_lowering")


@T.prim_func
def program(
    X3: T.Tensor((2, 1, 32, 64), "float16"),
    O7: T.Tensor((2, 1, 32, 8), "float16"),
):
    with T.Kernel(2, 1, threads=256) as (bx, by):
        a1 = T.alloc_shared((32, 64), "float16")
        a2 = T.alloc_shared((32, 64), "float16")
        S = W.alloc_symmetric((2, 1, 32, 64), "float16")
        f4 = T.alloc_fragment((32, 64), "float16")
        me = W.rank()
        for i, j in T.Parallel(32, 64):
            a2[i, j] = X3[bx, by, 31 - i, j]
        T.copy(a2, f4)
        T.copy(f4, S[(me + 1) % 3, bx, by, :, :])
        T.copy(S[me, bx, by, :, :], a1)
        T.copy(a1[:, 0:8], O7[bx, by, :, :])
