# RUN: %python %s | %filecheck %s
"""Accesses of shared memory that no barrier can order."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


@T.prim_func
def rotated(x: T.Tensor((256,), "float32"), y: T.Tensor((256,), "float32")):
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((256,), "float32")
        tx = T.get_thread_binding()
        W.fence("gpu")
        if x[tx] > 0:
            for step in T.serial(4):
                tile[tx] = step
                y[tx] += tile[255 - tx]


# The condition differs between threads, and both accesses are under it.
# CHECK: rotated: shared memory: a read of tile after a write of tile by another thread is not ordered by a barrier
# CHECK-SAME: expected both under conditions that all threads share, or in the same threads
# CHECK-NEXT: before --> {{.*}}sync_shared_memory-refused.py:[[# @LINE - 7]]
# CHECK-NEXT: after --> {{.*}}sync_shared_memory-refused.py:[[# @LINE - 7]]
with print_verdict("rotated"):
    tw.emit(rotated)
