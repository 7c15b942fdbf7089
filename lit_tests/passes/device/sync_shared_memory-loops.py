# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""A block barrier before a branch in which TileLang inserts barriers of its threads."""

import tileweave as tw
from tests.simulator.device.miscompiled import changes_for_fewer_threads

# All 128 threads read the tile, before 64 of them change it.
# CHECK: total[0] = (total[0] + tile[
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 64) {
# CHECK-NEXT: for (
# CHECK-NEXT: tl::__sync_thread_partial(3, 64);
# CHECK: }
# CHECK-NEXT: }
# CHECK-NOT: __syncthreads();
print(tw.emit(changes_for_fewer_threads()))
