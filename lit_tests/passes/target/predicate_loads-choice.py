# RUN: %python %s | %filecheck %s
"""The producer executes a branch that selects the source of a tile; consumers execute others."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W

M, N = 512, 512


@T.macro
def one_of_two(A, S, F, A_tile, me, row, k, K):
    if row % 2 == me:
        T.copy(A[row * 128, k * 64], A_tile)
    else:
        T.copy(S[me, row * 128, k * 64], A_tile)


@T.macro
def one_of_three(A, S, F, A_tile, me, row, k, K):
    if row % 2 == me:
        T.copy(A[row * 128, k * 64], A_tile)
    elif k < 4:
        T.copy(S[me, row * 128, k * 64], A_tile)
    else:
        T.copy(A[row * 128, K - k * 64], A_tile)


@T.macro
def awaited(A, S, F, A_tile, me, row, k, K):
    if k % 2 == me:
        T.copy(A[row * 128, k * 64], A_tile)
    else:
        W.wait_ge(F[me, k], 1)
        T.copy(S[me, row * 128, k * 64], A_tile)


@T.macro
def counted(A, S, F, A_tile, me, row, k, K):
    if k % 2 == me:
        T.copy(A[row * 128, k * 64], A_tile)
    else:
        W.red_add(F[me, k], 1, scope="gpu", sem="relaxed")
        T.copy(S[me, row * 128, k * 64], A_tile)


@T.macro
def maybe(A, S, F, A_tile, me, row, k, K):
    if row % 2 == me:
        T.copy(A[row * 128, k * 64], A_tile)


@T.macro
def different_parts(A, S, F, A_tile, me, row, k, K):
    if row % 2 == me:
        T.copy(A[row * 128, k * 64], A_tile)
    else:
        T.copy(A[row * 128, k * 64], A_tile[0:64, :])


@T.macro
def by_data(A, S, F, A_tile, me, row, k, K):
    if S[me, 0, k] > 0:
        T.copy(A[row * 128, k * 64], A_tile)
    else:
        T.copy(S[me, row * 128, k * 64], A_tile)


def show(name, load, K=512, **options):
    @T.prim_func
    def program(
        A: T.Tensor((M, K), "bfloat16"),
        S: W.Symmetric((M, K), "bfloat16"),
        F: W.Symmetric((8,), "uint32"),
        B: T.Tensor((N, 512), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(4, 4, threads=256) as (bx, by):
            A_tile = T.alloc_shared((128, 64), "bfloat16")
            B_tile = T.alloc_shared((128, 64), "bfloat16")
            total = T.alloc_fragment((128, 128), "float32")
            T.clear(total)
            for k in T.Pipelined(8, num_stages=3):
                load(A, S, F, A_tile, W.rank(), by, k, K)
                T.copy(B[bx * 128, k * 64], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C[by * 128, bx * 128])

    verdicts.show(program, name, **options)


# The elected thread executes one of the loads, and the barrier expects the bytes of one.
# CHECK-LABEL: TEST: two
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK-NEXT: expect_transaction((([[OWN:.*]]) ? 16384 : 0));
# CHECK-NEXT: if ([[OWN]]) {
# CHECK-NEXT: tl::tma_load(A_desc
# CHECK-NEXT: }
# CHECK-NEXT: expect_transaction((([[OTHER:.*]]) ? 16384 : 0));
# CHECK-NEXT: if ([[OTHER]]) {
# CHECK-NEXT: tl::tma_load(S_desc
# CHECK-NEXT: }
# CHECK-NEXT: arrive_and_expect_tx(16384);
# CHECK-NEXT: tl::tma_load(B_desc
# CHECK: } else {
# CHECK-NOT: A_tile) +
# CHECK: tl::wgmma_ss
show("two", one_of_two)

# CHECK-LABEL: TEST: three
# CHECK: if (tl::tl_shuffle_elect<128>()) {
# CHECK: == rank) {
# CHECK-NEXT: tl::tma_load(A_desc{{.*}} (k * 64),
# CHECK: != rank) && (k < 4)) {
# CHECK-NEXT: tl::tma_load(S_desc{{.*}} (k * 64),
# CHECK: != rank) && (4 <= k)) {
# CHECK-NEXT: tl::tma_load(A_desc{{.*}} (512 - (k * 64)),
# CHECK: tl::tma_load(B_desc
# CHECK: } else {
show("three", one_of_three)

# The producer waits only for the selected side.
# CHECK-LABEL: TEST: awaited
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: if ([[OTHER:.*!= rank]]) {
# CHECK-NEXT: tw::wait_ge<
# CHECK-NEXT: tw::fence_proxy_async();
# CHECK-NEXT: }
# CHECK-NEXT: if (tl::tl_shuffle_elect<128>()) {
# CHECK: tl::tma_load(A_desc
# CHECK: if ([[OTHER]]) {
# CHECK-NEXT: tl::tma_load(S_desc
# CHECK: } else {
# CHECK-NOT: tw::wait_ge<
show("awaited", awaited)


# These stay in their branch: loads that keep a part of the previous tile, branches with other
# statements or with conditions that read memory, and loads that the TMA does not support.
# CHECK-LABEL: TEST: maybe
# CHECK-NOT: tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: } else {
# CHECK: == rank) {
# CHECK: A_tile) +
show("maybe", maybe)

# CHECK-LABEL: TEST: different_parts
# CHECK-NOT: tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: } else {
# CHECK: == rank) {
# CHECK: A_tile) +
# CHECK: } else {
# CHECK: A_tile) +
show("different_parts", different_parts)

# CHECK-LABEL: TEST: counted
# CHECK-NOT: tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: tw::red_add<
# CHECK: A_tile) +
show("counted", counted)

# CHECK-LABEL: TEST: by_data
# CHECK-NOT: tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: S[
# CHECK: A_tile) +
show("by_data", by_data)

# CHECK-LABEL: TEST: rows_of_odd_bytes
# CHECK-NOT: tma_load(A_desc
# CHECK: tl::tma_load(B_desc
# CHECK: == rank) {
# CHECK: A_tile) +
show("rows_of_odd_bytes", one_of_two, K=516)

# Without a producer, all loads stay in their branches.
# CHECK-LABEL: TEST: unspecialized
# CHECK-NOT: tma_load
# CHECK: == rank) {
# CHECK: A_tile) +
show("unspecialized", one_of_two, pass_configs={"tl.disable_warp_specialized": True})

# CHECK-LABEL: TEST: sm_80
# CHECK-NOT: tma_load
# CHECK: == rank) {
# CHECK: A_tile) +
show("sm_80", one_of_two, arch="sm_80")
