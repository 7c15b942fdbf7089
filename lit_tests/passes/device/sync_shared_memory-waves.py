# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""The first threads overwrite a tile of the last wave after a barrier of the block."""

from tests import verdicts
from tests.simulator.device.miscompiled import reuses_tile_in_waves


def show(name, **options):
    verdicts.show(reuses_tile_in_waves(**options), name, world_size=1)


# The barrier at the end of a wave is one of the consumers.
# CHECK-LABEL: TEST: barrier of consumers
# CHECK: for (int wave = 0; wave < 2; ++wave) {
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 64) {
# CHECK-NEXT: tile)[((int)threadIdx.x)] = A[
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 128) {
# CHECK: tl::tma_store(
# CHECK: tl::__sync_thread_partial(3, 64);
# CHECK-NOT: __syncthreads();
show("barrier of consumers")

# TileLang inserts the barrier of the block; there is no second one.
# CHECK-LABEL: TEST: barrier of TileLang
# CHECK: for (int wave = 0; wave < 2; ++wave) {
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 64) {
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 128) {
# CHECK-NOT: __syncthreads();
show("barrier of TileLang", ends_with_barrier=False)
