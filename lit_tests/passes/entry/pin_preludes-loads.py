# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Uses of a tile before T.Pipelined, which also loads it, or waits for its load."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


def show(name, before, arch="sm_90a", in_loop=False, loads_tile=True):
    """Compile a program that uses a tile before a pipelined loop.

    Args:
        in_loop: whether the pipelined loop is in another loop.
        loads_tile: whether the loop loads the tile, which it multiplies in any case.
    """

    @T.prim_func
    def program(
        X: T.Tensor((64, 256), "float16"),
        Y: T.Tensor((64, 64), "float32"),
        Z: T.Tensor((2, 64, 64), "float16"),
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            other = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            W.fence("gpu")
            T.clear(total)
            if in_loop:
                for t in T.serial(2):
                    before(X, Z[t, 0, 0], tile, total)
                    for k in T.Pipelined(4, num_stages=1):
                        T.copy(X[0, k * 64], tile)
                        T.gemm(tile, tile, total)
            else:
                before(X, Z[0, 0, 0], tile, total)
                for k in T.Pipelined(4, num_stages=1):
                    if loads_tile:
                        T.copy(X[0, k * 64], tile)
                    T.copy(X[0, k * 64], other)
                    T.gemm(tile, other, total)
            T.copy(total, Y)

    print("TEST:", name)
    print(tw.emit(program, arch=arch))


@T.macro
def load(X, z, tile, total):
    T.copy(X[0, 64], tile)


@T.macro
def load_and_store(X, z, tile, total):
    T.copy(X[0, 64], tile)
    T.copy(tile, z)


@T.macro
def load_and_add(X, z, tile, total):
    T.copy(X[0, 64], tile)
    for i, j in T.Parallel(64, 64):
        total[i, j] += tile[i, j]


@T.macro
def load_by_threads_and_convert(X, z, tile, total):
    values = T.alloc_fragment((64, 64), "float16")
    for i, j in T.Parallel(64, 64):
        tile[i, j] = X[i, j]
    T.copy(tile, values)
    for i, j in T.Parallel(64, 64):
        total[i, j] += values[i, j]


# The load ends before the producer loads the tile again.
# CHECK-LABEL: TEST: load{{$}}
# CHECK: tile){{.*}} = {{.*}}(X +
# CHECK: __syncthreads();
# CHECK: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_load(X_desc{{.*}}tile
show("load", load)

# The loop waits for the load, where it first reads the tile.
# CHECK-LABEL: TEST: loaded_before
# CHECK: tl::tma_load(X_desc{{.*}}tile
# CHECK-NOT: .wait(
# CHECK: if (((int)threadIdx.x) < 128) {
show("loaded_before", load, loads_tile=False)

# CHECK-LABEL: TEST: stored
# CHECK: tile){{.*}} = {{.*}}(X +
# CHECK: __syncthreads();
# CHECK: tl::tma_store(Z_desc{{.*}}tile
# CHECK: if (((int)threadIdx.x) < 128) {
show("stored", load_and_store, loads_tile=False)

# A barrier of the block is between the use and the load of the producer.
# CHECK-LABEL: TEST: added{{$}}
# CHECK: tile){{.*}} = {{.*}}(X +
# CHECK: __syncthreads();
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: (tile_local_cast + 0) = {{.*}}tile)
# CHECK: __syncthreads();
# CHECK: if (((int)threadIdx.x) < 128) {
show("added", load_and_add)

# CHECK-LABEL: TEST: added_in_loop
# CHECK: for (int t = 0;
# CHECK: tile {{.*}} = {{.*}}(X +
# CHECK: __syncthreads();
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: (tile_local_cast + 0) = {{.*}}tile
# CHECK: __syncthreads();
# CHECK: if (((int)threadIdx.x) < 128) {
show("added_in_loop", load_and_add, in_loop=True)

# CHECK-LABEL: TEST: converted
# CHECK: tile){{.*}} = {{.*}}X
# CHECK: __syncthreads();
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: tl::ptx_ldmatrix_x4({{.*}}tile)
# CHECK: __syncthreads();
# CHECK: if (((int)threadIdx.x) < 128) {
show("converted", load_by_threads_and_convert)
