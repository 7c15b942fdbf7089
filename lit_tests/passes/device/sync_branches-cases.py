# RUN: %python %s | %filecheck %s
"""Each path through a branch or past a loop has the barriers that TileLang relies on."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import SMALL
from tileweave.ops.gemm.kernels.gemm_reduce_scatter import gemm_rs_store


def show(program):
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, world_size=2))


# Tiles share memory: neither case writes a tile before all warp groups have multiplied. Branches on
# the thread index have their own barriers.
# CHECK-LABEL: TEST: gemm_rs_store
# CHECK: void* A_tile = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK-NEXT: void* C_tile = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: } else {
# CHECK-NEXT: tl::warpgroup_reg_alloc<240>();
# CHECK: tl::wgmma_ss<
# CHECK: != rank) {
# CHECK-NEXT: tl::__sync_thread_partial(3, 256);
# CHECK: tw::signal<
# CHECK: tl::__sync_thread_partial(3, 256);
# CHECK-NEXT: } else {
# CHECK-NEXT: tl::__sync_thread_partial(3, 256);
# CHECK-NEXT: tw::wait_reached<
# CHECK: *(uint4*)(((bfloat16_t*)C_tile)
show(gemm_rs_store(GemmConfig(2048, 2048, 2048, 2, "bfloat16", True, SMALL)))


@T.prim_func
def past_a_loop(x: T.Tensor((256,), "float32"), y: T.Tensor((256,), "float32")):
    with T.Kernel(2, threads=256) as block:
        first = T.alloc_shared((256,), "float32")
        second = T.alloc_shared((256,), "float32")
        W.fence("gpu")
        for i in T.Parallel(256):
            first[i] = x[i]
        for _ in T.serial(block + W.rank()):
            for i in T.Parallel(256):
                second[i] = x[i] + y[i]
            for i in T.Parallel(256):
                y[i] = second[255 - i]
        for i in T.Parallel(256):
            y[i] = y[i] + first[255 - i]


# If the loop does not run, nothing else orders the write of ``first`` before its read.
# CHECK-LABEL: TEST: past_a_loop
# CHECK: first{{.*}} = x[
# CHECK-NEXT: for (int {{.*}} < (((int)blockIdx.x) + rank)
# CHECK: __syncthreads();
# CHECK: __syncthreads();
# CHECK-NEXT: y[
# CHECK-NEXT: }
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: y[
show(past_a_loop)
