# RUN: %python %s | %filecheck %s
"""Barriers in the branches of an operator, and none where threads access their own elements.

Missing and misplaced barriers: tests/generated/known.
"""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import SMALL
from tileweave.ops.gemm.kernels.gemm_reduce_scatter import gemm_rs_store

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
show(gemm_rs_store(GemmConfig(2048, 2048, 2048, 2, "bfloat16", True, SMALL)), world_size=2)


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
show(same_threads, world_size=2)
