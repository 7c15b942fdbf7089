"""A tile is filled, then one rank overwrites some of its rows."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_80", ("sync_shared_memory",)


@T.prim_func
def program(
    X2: T.Tensor((1, 48, 128), "float32"),
    n: T.Tensor((1, 4), "int32"),
    X6: T.Tensor((1, 48, 128), "float32"),
    O7: T.Tensor((1, 128, 48), "float32"),
):
    with T.Kernel(1, threads=384) as bx:
        a1 = T.alloc_shared((48, 128), "float32")
        a5 = T.alloc_shared((48, 128), "float32")
        S = W.alloc_symmetric((1, 48, 128), "float32")
        me = W.rank()
        T.fill(a1, 1)
        if me < 1:
            for s in T.serial(n[bx, 1]):
                T.copy(X2[bx, s, 0:128], a1[s + 45, 0:128])
        for i, j in T.Parallel(48, 128):
            a5[i, j] = X6[bx, i, j]
        for i, j in T.Parallel(128, 48):
            O7[bx, i, j] = a5[j, i]
        T.copy(a1, S[(me + 1) % 2, bx, :, :])
