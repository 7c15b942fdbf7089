"""A statement of single threads is between a tile and its copy, before a pipelined loop."""

import tilelang.language as T

from tileweave import language as W

RANKS, ARCH, FIXES = 2, "sm_90a", ("sync_shared_memory",)


@T.prim_func
def program(
    X2: T.Tensor((1, 2, 32, 128), "float32"),
    O4: T.Tensor((1, 2, 128), "int32"),
    G6: T.Tensor((1, 2, 1, 3, 32, 128), "float32"),
    O9: T.Tensor((1, 2, 32, 128), "float32"),
):
    with T.Kernel(1, 2, threads=128) as (bx, by):
        a1 = T.alloc_shared((32, 128), "float32")
        a3 = T.alloc_shared((128,), "int32")
        a5 = T.alloc_shared((32, 128), "float32")
        a7 = T.alloc_shared((32, 128), "float32")
        f8 = T.alloc_fragment((32, 128), "float32")
        S = W.alloc_symmetric((1, 2, 32, 128), "float32")
        me = W.rank()
        tx = T.get_thread_binding()
        for i, j in T.Parallel(32, 128):
            a1[i, j] = X2[bx, by, i, 127 - j]
        a3[tx] = tx * 3
        O4[bx, by, tx] = a3[(tx + 59) % 128]
        T.copy(a1[0:16, :], a5[16:32, :])
        T.clear(f8)
        for k in T.Pipelined(3, num_stages=3):
            T.copy(G6[bx, by, 0, k, 0:32, 0:128], a7)
            for i, j in T.Parallel(32, 128):
                f8[i, j] += a7[i, j]
        T.copy(f8, O9[bx, by, :, :])
        T.copy(a1, S[(me + 1) % 2, bx, by, :, :])
