"""An operand of a product in registers is stored to shared memory: a barrier in a branch."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_80", ("sync_shared_memory",)


@T.prim_func
def program(
    X1: T.Tensor((2, 64, 64), "float16"),
    X2: T.Tensor((2, 32, 64), "float16"),
    O7: T.Tensor((2, 64, 32), "float32"),
):
    with T.Kernel(2, threads=256) as bx:
        a3 = T.alloc_shared((64, 64), "float16")
        a4 = T.alloc_shared((32, 64), "float16")
        f5 = T.alloc_fragment((64, 64), "float16")
        f6 = T.alloc_fragment((64, 32), "float32")
        S = W.alloc_symmetric((2, 64, 64), "float16")
        me = W.rank()
        T.copy(X1[bx, :, :], a3)
        T.copy(X2[bx, :, :], a4)
        T.clear(f6)
        T.copy(a3, f5)
        T.gemm(f5, a4, f6, transpose_B=True)
        T.copy(f6, O7[bx, :, :])
        for i, j in T.Parallel(64, 64):
            a3[i, j] = f5[i, j]
        T.copy(a3, S[(me + 1) % 2, bx, :, :])
