# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""A block whose loop may have no iterations waits before the loop for loads that precede it."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W

M, N, K = 64, 64, 64


def show(name, steps=None):
    @T.prim_func
    def program(
        A: T.Tensor((4 * M, K), "bfloat16"),
        B: T.Tensor((4 * N, K), "bfloat16"),
        counts: T.Tensor((4,), "int32"),
        F: W.Symmetric((4,), "uint32"),
        C: T.Tensor((4 * M, N), "float32"),
    ):
        with T.Kernel(4, threads=128) as bx:
            A_tile = T.alloc_shared((M, K), "bfloat16")
            B_tile = T.alloc_shared((N, K), "bfloat16")
            total = T.alloc_fragment((M, N), "float32")
            W.wait_ge(F[W.rank(), bx], 1)
            T.copy(A[bx * M, 0], A_tile)
            T.clear(total)
            for k in T.Pipelined(counts[bx] if steps is None else steps, num_stages=2):
                T.copy(B[k * N, 0], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C[bx * M, 0])

    verdicts.show_unordered(program, name)


# CHECK-LABEL: TEST: unknown number
# CHECK: mbarrier[[[A:[0-9]+]]].arrive_and_expect_tx(
# CHECK: tl::tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: } else {
# CHECK: mbarrier[[[A]]].wait(0);
# CHECK-NEXT: for (int k_1 = 0;
# CHECK-NEXT: mbarrier[
show("unknown number")

# The loop runs, so the first iteration waits.
# CHECK-LABEL: TEST: known number
# CHECK: mbarrier[[[A:[0-9]+]]].arrive_and_expect_tx(
# CHECK: tl::tma_load(A_desc
# CHECK: } else {
# CHECK: for (int k_1 = 0;
# CHECK: mbarrier[[[A]]].wait(0);
show("known number", 4)
