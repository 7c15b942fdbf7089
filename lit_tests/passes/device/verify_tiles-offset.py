# RUN: %python %s | %filecheck %s
"""Tiles that threads write and wgmma reads must begin where the swizzle repeats."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def multiply(floats):
    """A buffer that is larger than the tiles lies before them."""

    @T.prim_func
    def program(
        A: T.Tensor((64, 64), "float8_e4m3fn"), B: T.Tensor((64, 64), "float8_e4m3fn"),
        C: T.Tensor((64, 64), "float32"), x: T.Tensor((floats,), "float32"),
        flag: T.Tensor((4,), "uint32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            large = T.alloc_shared((floats,), "float32")
            A_tile, B_tile = (
                T.alloc_shared((64, 64), "float16"),
                T.alloc_shared((64, 64), "float16"),
            )
            total = T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            T.copy(x, large)
            for i, j in T.Parallel(64, 64):
                A_tile[i, j] = A[i, j]
                B_tile[i, j] = B[i, j]
            T.gemm(A_tile, B_tile, total, transpose_B=True)
            for i, j in T.Parallel(64, 64):
                C[i, j] = total[i, j] + large[i]
            W.red_add(flag[0], 1)

    return program


def show(name, program, arch="sm_90a"):
    try:
        tw.emit(program, arch=arch)
    except tw.LanguageError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: accepted")


# CHECK: 8704 bytes: T.gemm: wgmma reads a tile from byte 8704 of shared memory; expected a multiple of 1024: give each larger T.alloc_shared a multiple of 1024 bytes
show("8704 bytes", multiply(2176))

# CHECK: 9216 bytes: accepted
show("9216 bytes", multiply(2304))

# CHECK: smaller than a tile: accepted
show("smaller than a tile", multiply(100))

# CHECK: without wgmma: accepted
show("without wgmma", multiply(2176), "sm_80")
