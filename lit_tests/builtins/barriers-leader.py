# RUN: %python %s | %filecheck %s
"""A barrier is called by one thread, and the block synchronizes before and after it."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def grid():
    with T.Kernel(4, threads=128):
        W.sync_grid()


# Without own words it uses those of the process, which a null pointer selects.
# CHECK-LABEL: TEST: grid
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: uint64_t [[NULL:[a-z_0-9]+]] = (uint64_t)0;
# CHECK-NEXT: tw::sync_grid((*(void* *)(&([[NULL]]))), tileweave_context, {{[0-9]+}});
# CHECK-NEXT: }
# CHECK-NEXT: __syncthreads();
show(grid)


@T.prim_func
def ranks(B: W.Symmetric((6,), "uint32")):
    with T.Kernel(4, threads=128) as bx:
        if bx == 0:
            W.sync_ranks(B[W.rank(), 0])


# A condition on the block index is uniform.
# CHECK-LABEL: TEST: ranks
# CHECK: if (((int)blockIdx.x) == 0) {
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 0) {
# CHECK-NEXT: tw::sync_ranks((&(B[(((int64_t)rank) * (int64_t)268435456)])), tileweave_context, {{[0-9]+}});
show(ranks)


@T.prim_func
def blocks(S: W.Symmetric((512, 512), "bfloat16")):
    with T.Kernel(4, threads=(16, 8)) as bx:
        tile = T.alloc_shared((128, 128), "bfloat16")
        T.clear(tile)
        T.copy(tile, S[1, bx * 128, 0])
        W.barrier_blocks()


# TMA stores complete before the barrier publishes them.
# CHECK-LABEL: TEST: blocks
# CHECK: tl::tma_store(
# CHECK: tw::complete_bulk_stores();
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if ((((int)threadIdx.x) == 0) && (((int)threadIdx.y) == 0)) {
# CHECK: tw::barrier_blocks(
show(blocks)
