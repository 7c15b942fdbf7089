# RUN: %python %s | %filecheck %s
"""Tensor cores read 32 bytes of each row of an operand."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(inner, dtype, arch):
    @T.prim_func
    def program(
        A: T.Tensor((64, inner), dtype), B: T.Tensor((64, inner), dtype),
        C: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            A_tile, B_tile = T.alloc_shared((64, inner), dtype), T.alloc_shared((64, inner), dtype)
            total = T.alloc_fragment((64, 64), "float32")
            T.copy(A, A_tile)
            T.copy(B, B_tile)
            T.clear(total)
            T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C)
            W.fence("gpu")

    with print_verdict(f"{inner} of {dtype}"):
        tw.emit(program, arch=arch)


# CHECK: 16 of float8_e4m3fn: T.gemm: the inner extent of A_tile is 16; expected a multiple of 32, which tensor cores read of each row of float8_e4m3fn
# LINE: CHECK-NEXT: --> {{.*}}verify_operators-products.py:[[# @LINE - 9]]
show(16, "float8_e4m3fn", "sm_90a")

# CHECK: 32 of float8_e4m3fn: accepted
show(32, "float8_e4m3fn", "sm_90a")

# CHECK: 8 of float16: T.gemm: the inner extent of A_tile is 8; expected a multiple of 16
show(8, "float16", "sm_80")

# CHECK: 16 of float16: accepted
show(16, "float16", "sm_80")

# CHECK: 8 of float32: accepted
show(8, "float32", "sm_80")
