"""A tile that no statement reads has the memory of one that is written next."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 3, "sm_90a", ("sync_shared_memory",)


@T.prim_func
def program(
    X3: T.Tensor((1, 32, 64), "bfloat16"),
    O5: T.Tensor((1, 32, 64), "bfloat16"),
):
    with T.Kernel(1, threads=128) as bx:
        a1 = T.alloc_shared((32, 64), "bfloat16")
        a2 = T.alloc_shared((32, 64), "bfloat16")
        S = W.alloc_symmetric((1, 32, 64), "bfloat16")
        a4 = T.alloc_shared((32, 64), "bfloat16")
        me = W.rank()
        T.copy(X3[bx, :, :], a2)
        T.copy(a2, S[(me + 1) % 3, bx, :, :])
        T.copy(X3[bx, 8:24, 0:32], a1[8:24, 0:32])
        T.copy(S[me, bx, :, :], a4)
        T.copy(a4, O5[bx, :, :])
