# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Thread-local memory that TileLang computes in some warps only must not be read by others."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def advanced(after, steps):
    """The row of the next tile is computed before or after the loop over K."""

    @T.prim_func
    def program(
        A: T.Tensor((512, 256), "float16"), B: T.Tensor((64, 256), "float16"),
        C: T.Tensor((512, 64), "float32"), counts: T.Tensor((4,), "int32"),
        flag: T.Tensor((4,), "uint32"),
    ):  # fmt: skip
        with T.Kernel(4, threads=128):
            A_tile, B_tile = (
                T.alloc_shared((64, 64), "float16"),
                T.alloc_shared((64, 64), "float16"),
            )
            total = T.alloc_fragment((64, 64), "float32")
            row = T.alloc_var("int32", 0)
            for e in T.serial(4):
                if not after:
                    row = counts[e]
                T.clear(total)
                for k in steps(4):
                    T.copy(A[row, k * 64], A_tile)
                    T.copy(B[0, k * 64], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C[row, 0])
                if after:
                    row = row + counts[e]
            W.red_add(flag[0], 1)

    return program


@T.prim_func
def counted(
    A: T.Tensor((512, 256), "float16"), B: T.Tensor((64, 256), "float16"),
    C: T.Tensor((512, 64), "float32"), counts: T.Tensor((4,), "int32"),
    flag: T.Tensor((4,), "uint32"),
):  # fmt: skip
    """The number of iterations of a loop is computed after the loop over K."""
    with T.Kernel(4, threads=128):
        A_tile, B_tile = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        tiles = T.alloc_var("int32", 1)
        for e in T.serial(4):
            for tile in T.serial(tiles):
                T.clear(total)
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[tile * 64, k * 64], A_tile)
                    T.copy(B[0, k * 64], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C[tile * 64, 0])
                tiles = tiles + counts[e]
        W.red_add(flag[0], 1)


def pipelined(count):
    return T.Pipelined(count, num_stages=2)


def show(name, program, arch="sm_90a"):
    with print_verdict(name):
        tw.emit(program, arch=arch)


# The producer would load the rows from 0 on in each iteration.
# CHECK: after the loop: row: TileLang moves its computation to some of the warps of a pipelined loop, and other warps read it; expected shared memory instead of row, or T.serial instead of T.Pipelined
# SINCE_0_1_14: CHECK-NEXT: --> {{.*}}verify_locals-warps.py:
show("after the loop", advanced(True, pipelined))

# CHECK: before the loop: accepted
show("before the loop", advanced(False, pipelined))

# CHECK: without a pipeline: accepted
show("without a pipeline", advanced(True, T.serial))

# CHECK: without warp specialization: accepted
show("without warp specialization", advanced(True, pipelined), "sm_80")

# The producer would execute one iteration, and wait for the consumers at the next barrier.
# CHECK: bound of a loop: tiles: TileLang moves its computation to some of the warps
# SINCE_0_1_14: CHECK-NEXT: --> {{.*}}verify_locals-warps.py:
show("bound of a loop", counted)
