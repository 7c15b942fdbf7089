# RUN: %python %s | %filecheck %s
"""A ring buffer with only bulk copies has no block barriers; a tile that threads access keeps them."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


def ring(threads_write, name):
    @T.prim_func
    def program(src: T.Tensor((64, 1024), "float32"), dst: T.Tensor((64, 1024), "float32")):
        with T.Kernel(1, threads=128):
            tiles = T.alloc_shared((2, 1024), "float32")
            full = T.alloc_barrier([1, 1])
            if threads_write:
                for i in T.Parallel(1024):
                    tiles[0, i] = src[0, i]
            if T.get_thread_binding() == 0:
                for k in T.serial(64):
                    W.bulk_load(tiles[k % 2, 0], src[k, 0], 1024, full[k % 2])
                    T.mbarrier_arrive(full[k % 2])
                    T.mbarrier_wait_parity(full[k % 2], k // 2 % 2)
                    W.bulk_store(dst[k, 0], tiles[k % 2, 0], 1024)
                    W.bulk_commit()
                    W.bulk_wait(0, read=True)

    return program.with_attr("global_symbol", name)


# CHECK-LABEL: TEST: bulk_only
# CHECK: fence_barrier_init
# CHECK-NEXT: __syncthreads
# CHECK-NOT: __syncthreads
# CHECK: tw::bulk_load
# CHECK-NOT: __syncthreads
# CHECK: tw::bulk_wait<0, true>
show(ring(False, "bulk_only"))

# CHECK-LABEL: TEST: threads_too
# CHECK: fence_barrier_init
# CHECK-NEXT: __syncthreads
# CHECK: (float4*)
# CHECK: __syncthreads
# CHECK: tw::bulk_load
show(ring(True, "threads_too"))
