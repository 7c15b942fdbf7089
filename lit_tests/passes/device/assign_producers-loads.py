# RUN: %python %s | %filecheck %s
"""Producer warps that load nothing leave, because they could miss a phase of a barrier."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W

M, N, K = 512, 512, 512


def show(name, by_threads=False, waits_inside=False):
    @T.prim_func
    def program(
        A: W.Symmetric((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        F: W.Symmetric((8,), "uint32"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            A_tile = T.alloc_shared((128, 64), "bfloat16")
            B_tile = T.alloc_shared((128, 64), "bfloat16")
            total = T.alloc_fragment((128, 128), "float32")
            if not waits_inside:
                W.wait_ge(F[W.rank(), by], 1)
            T.clear(total)
            for k in T.Pipelined(K // 64, num_stages=3):
                if waits_inside:
                    W.wait_ge(F[W.rank(), k], 1)
                if by_threads:
                    for i, j in T.Parallel(128, 64):
                        A_tile[i, j] = T.max(A[W.rank(), by * 128 + i, k * 64 + j], T.bfloat16(0))
                else:
                    T.copy(A[W.rank(), by * 128, k * 64], A_tile)
                T.copy(B[bx * 128, k * 64], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C[by * 128, bx * 128])

    verdicts.show_unordered(program, name)


# All threads of the group release registers; one warp continues.
# CHECK-LABEL: TEST: by_tma
# CHECK: tw::wait_ge
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK-NEXT: tl::warpgroup_reg_dealloc<24>();
# CHECK-NEXT: if ((((int)threadIdx.x) & 127) < 32) {
# CHECK-NEXT: for (int k = 0; k < 8; ++k) {
# CHECK-NEXT: mbarrier[{{.*}}].wait(
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK: } else {
# CHECK-NOT: < 32) {
show("by_tma")

# The same warp executes the wait of each iteration.
# CHECK-LABEL: TEST: waits_inside
# CHECK: if ((((int)threadIdx.x) & 127) < 32) {
# CHECK-NEXT: for (int k = 0; k < 8; ++k) {
# CHECK: tw::wait_ge
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK: } else {
# CHECK-NOT: < 32) {
show("waits_inside", waits_inside=True)

# Every producer thread loads and arrives, so no warp leaves.
# CHECK-LABEL: TEST: by_threads
# CHECK: tw::wait_ge
# CHECK-NOT: & 127) < 32) {
show("by_threads", by_threads=True)
