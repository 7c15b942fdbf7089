# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Block barriers around a branch in which TileLang inserts barriers of its threads."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def changes_for_fewer_threads(
    counts: T.Tensor((2,), "uint32"), x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")
):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64,), "float32")
        total = T.alloc_fragment((64,), "float32")
        next_count = W.ld(counts[0], scope="gpu", sem="relaxed") + T.uint32(1)
        if T.get_thread_binding() == 0:
            counts[1] = next_count
        T.copy(x, tile)
        T.clear(total)
        for i in T.Parallel(64):
            total[i] = total[i] + tile[i]
        for _ in T.serial(2):
            for i in T.Parallel(64):
                tile[i] = tile[i] * 2
        T.copy(total, y)


# All 128 threads read the tile, before 64 of them change it.
# CHECK: total[0] = (total[0] + tile[
# CHECK-NEXT: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) < 64) {
# CHECK-NEXT: for (
# CHECK-NEXT: tl::__sync_thread_partial(3, 64);
# CHECK: }
# CHECK-NEXT: }
# CHECK-NEXT: __syncthreads();
print(tw.emit(changes_for_fewer_threads))
