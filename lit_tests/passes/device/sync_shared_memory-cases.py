# RUN: %python %s | %filecheck %s
"""Each path through a branch or past a loop has the barriers that its accesses need."""

import tilelang.language as T

import tileweave as tw
from tests.simulator.device.shared_memory import border, stored_operand
from tileweave import language as W
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import SMALL
from tileweave.ops.gemm.kernels.gemm_reduce_scatter import gemm_rs_store


def show(program):
    print("TEST:", program.attrs["global_symbol"])
    print(tw.emit(program, world_size=2))


# Tiles share memory: neither case writes a tile before all warp groups have multiplied.
# CHECK-LABEL: TEST: gemm_rs_store
# CHECK: void* A_tile = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK-NEXT: void* C_tile = ((void*)((char*)buf_dyn_shmem + 0));
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: } else {
# CHECK-NEXT: tl::warpgroup_reg_alloc<240>();
# CHECK: tl::wgmma_ss<
# CHECK: tl::__sync_thread_partial(3, 256);
# CHECK-NEXT: if ({{.*}} != rank) {
# CHECK: tw::signal<
# CHECK: } else {
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

# Different threads write one row.
# CHECK-LABEL: TEST: border
# CHECK: tile{{.*}} =
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 240) {
# CHECK-NEXT: tile
show(border)


@T.prim_func
def same_threads(x: T.Tensor((256,), "float32"), y: T.Tensor((256,), "float32")):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((256,), "float32")
        W.fence("gpu")
        for i in T.Parallel(256):
            tile[i] = x[i]
        for i in T.Parallel(256):
            tile[i] = tile[i] + 1
        for i in T.Parallel(256):
            y[i] = tile[i]


# Each thread accesses its own elements only.
# CHECK-LABEL: TEST: same_threads
# CHECK: fence
# CHECK-NOT: __syncthreads();
# CHECK: y[
show(same_threads)

# TileLang's barrier would be one of all threads, under a condition that half of them fulfill.
# CHECK-LABEL: TEST: stored_operand
# CHECK: tl::mma_sync<
# CHECK: __syncthreads();
# CHECK-NEXT: if ({{.*}} == 0) {
# CHECK-NOT: __syncthreads();
# CHECK: Y_tile
# CHECK: }
# CHECK: __syncthreads();
show(stored_operand)
