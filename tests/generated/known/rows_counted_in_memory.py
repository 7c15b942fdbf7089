"""A loop whose extent is read from memory overwrites rows of a tile."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_90a", ("sync_shared_memory",)


@T.prim_func
def program(
    X2: T.Tensor((2, 1, 48, 32), "float32"),
    X4: T.Tensor((2, 1, 48, 32), "bfloat16"),
    n: T.Tensor((2, 1, 4), "int32"),
    O6: T.Tensor((2, 1, 48, 32), "bfloat16"),
):
    with T.Kernel(2, 1, threads=384) as (bx, by):
        a1 = T.alloc_shared((48, 32), "bfloat16")
        f3 = T.alloc_fragment((48, 32), "float32")
        S = W.alloc_symmetric((2, 1, 48, 32), "bfloat16")
        me = W.rank()
        T.copy(X2[bx, by, :, :], f3)
        T.copy(f3, a1)
        for s in T.serial(n[bx, by, 1]):
            T.copy(X4[bx, by, s, 0:32], a1[s + 45, 0:32])
        T.copy(a1, S[(me + 1) % 2, bx, by, :, :])
        T.copy(a1, O6[bx, by, :, :])
