"""A tile that the TMA stores has the memory of one that a later loop loads."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_90a", ("sync_shared_memory",)


@T.prim_func
def program(
    X3: T.Tensor((1, 2, 2, 64, 32), "bfloat16"),
    X4: T.Tensor((1, 2, 2, 32, 32), "bfloat16"),
    O8: T.Tensor((1, 2, 64, 32), "float32"),
    X10: T.Tensor((1, 2, 2, 64, 32), "float16"),
    X11: T.Tensor((1, 2, 2, 32, 32), "float16"),
):
    with T.Kernel(1, 2, threads=128) as (bx, by):
        a1 = T.alloc_shared((32, 64), "int32")
        a5 = T.alloc_shared((64, 32), "bfloat16")
        a6 = T.alloc_shared((32, 32), "bfloat16")
        f7 = T.alloc_fragment((64, 32), "float32")
        a9 = T.alloc_shared((64, 16), "float32")
        a12 = T.alloc_shared((64, 32), "float16")
        a13 = T.alloc_shared((32, 32), "float16")
        f14 = T.alloc_fragment((64, 32), "float32")
        S = W.alloc_symmetric((1, 2, 32, 64), "int32")
        me = W.rank()
        T.fill(a1, 2)
        T.clear(f7)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(X3[bx, by, k, 0:64, 0:32], a5)
            T.copy(X4[bx, by, k, 0:32, 0:32], a6)
            T.gemm(a5, a6, f7, transpose_B=True)
        T.copy(f7[:, 0:16], a9)
        T.copy(a9, O8[bx, by, :, 16:32])
        T.clear(f14)
        for k in T.Pipelined(2, num_stages=1):
            T.copy(X10[bx, by, k, 0:64, 0:32], a12)
            T.copy(X11[bx, by, k, 0:32, 0:32], a13)
            T.gemm(a12, a13, f14, transpose_B=True)
        for i, j in T.Parallel(32, 64):
            S[(me + 1) % 2, bx, by, i, j] = a1[i, j]
