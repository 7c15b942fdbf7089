# RUN: %python %s | %filecheck %s
"""A barrier expects the bytes of executed loads only, and its phases advance without loads."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W

M, N, K = 512, 512, 512


def show(name, columns, chooses=True):
    @T.prim_func
    def program(
        A: T.Tensor((M, K), "bfloat16"),
        S: W.Symmetric((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            A_tile = T.alloc_shared((128, columns), "bfloat16")
            B_tile = T.alloc_shared((128, columns), "bfloat16")
            total = T.alloc_fragment((128, 128), "float32")
            T.clear(total)
            for k in T.Pipelined(K // columns, num_stages=2):
                if chooses and by % 2 == W.rank():
                    T.copy(A[by * 128, k * columns], A_tile)
                else:
                    T.copy(S[W.rank(), by * 128, k * columns], A_tile)
                T.copy(B[bx * 128, k * columns], B_tile)
                for i, j in T.Parallel(128, columns):
                    A_tile[i, j] = T.max(A_tile[i, j], T.bfloat16(0))
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C[by * 128, bx * 128])

    verdicts.show(program, name)


# A and B are needed at different times, so each load has a barrier, at which all iterations arrive.
# CHECK-LABEL: TEST: own_barriers
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK-NEXT: arrive_and_expect_tx((([[OWN:.*]]) ? 16384 : 0));
# CHECK-NEXT: if ([[OWN]]) {
# CHECK-NEXT: tl::tma_load(A_desc
# CHECK-NEXT: }
# CHECK: arrive_and_expect_tx((([[OTHER:.*]]) ? 16384 : 0));
# CHECK-NEXT: if ([[OTHER]]) {
# CHECK-NEXT: tl::tma_load(S_desc
# CHECK-NEXT: }
# CHECK: arrive_and_expect_tx(16384);
# CHECK-NEXT: tl::tma_load(B_desc
show("own_barriers", 64)

# One barrier counts several loads.
# CHECK-LABEL: TEST: wide
# CHECK: arrive_and_expect_tx((([[OWN:.*]]) ? 32768 : 0));
# CHECK: if ([[OWN]]) {
# CHECK-NEXT: tl::tma_load(A_desc
# CHECK: arrive_and_expect_tx((([[OTHER:.*]]) ? 32768 : 0));
# CHECK: if ([[OTHER]]) {
# CHECK-NEXT: tl::tma_load(S_desc
# CHECK: arrive_and_expect_tx(32768);
show("wide", 128)

# CHECK-LABEL: TEST: one_tensor
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK-NEXT: arrive_and_expect_tx(16384);
# CHECK-NEXT: tl::tma_load(S_desc
show("one_tensor", 64, chooses=False)
