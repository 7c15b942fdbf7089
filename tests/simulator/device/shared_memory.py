"""Programs whose accesses of shared memory need barriers that TileLang leaves out or misplaces."""

import tilelang.language as T

from tileweave import language as W


@T.prim_func
def border(X: T.Tensor((32, 64), "bfloat16"), Y: T.Tensor((32, 64), "bfloat16")):
    """Clear a tile, then load its inner rows by other threads."""
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((32, 64), "bfloat16")
        W.fence("gpu")
        T.clear(tile)
        T.copy(X[0:30, :], tile[1:31, :])
        T.copy(tile, Y)


@T.prim_func
def stored_operand(
    X: T.Tensor((64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
    Y: T.Tensor((64, 64), "float16"),
):
    """Store an operand of a product, of which two warps have the same elements."""
    with T.Kernel(1, threads=128):
        X_tile = T.alloc_shared((64, 64), "float16")
        B_tile = T.alloc_shared((64, 64), "float16")
        Y_tile = T.alloc_shared((64, 64), "float16")
        operand = T.alloc_fragment((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        W.fence("gpu")
        T.copy(X, X_tile)
        T.copy(B, B_tile)
        T.clear(total)
        T.copy(X_tile, operand)
        T.gemm(B_tile, operand, total, transpose_B=True)
        T.copy(total, C)
        for i, j in T.Parallel(64, 64):
            Y_tile[i, j] = operand[i, j]
        T.copy(Y_tile, Y)


@T.prim_func
def statement_of_some_threads(
    X: T.Tensor((48, 128), "int8"),
    A: T.Tensor((2, 48, 128), "int8"),
    N: T.Tensor((256,), "int32"),
    Y: T.Tensor((48, 128), "int8"),
    Z: T.Tensor((48, 128), "int32"),
):
    """Exchange elements by 256 threads, between a write and a copy of a tile by all 384."""
    with T.Kernel(1, threads=256):
        first = T.alloc_shared((48, 128), "int8")
        second = T.alloc_shared((48, 128), "int8")
        numbers = T.alloc_shared((256,), "int32")
        tile = T.alloc_shared((48, 128), "int8")
        total = T.alloc_fragment((48, 128), "int32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        for i, j in T.Parallel(48, 128):
            first[i, j] = X[47 - i, j]
        numbers[tx] = tx * 3
        N[tx] = numbers[(tx + 133) % 256]
        T.copy(first[0:24, :], second[24:48, :])
        T.copy(first[24:48, :], second[0:24, :])
        T.clear(total)
        for k in T.Pipelined(2, num_stages=2):
            T.copy(A[k, 0, 0], tile)
            for i, j in T.Parallel(48, 128):
                total[i, j] += tile[i, j]
        T.copy(second, Y)
        T.copy(total, Z)
