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


@T.macro
def produce(x, tile, ready, tx):
    tile[tx - 128] = x[tx]
    T.barrier_arrive(ready)


@T.macro
def consume(y, tile, ready, tx):
    T.barrier_wait(ready, 0)
    y[tx] = tile[127 - tx]


def of_two_roles(name, body):
    """Compile a program whose ``body`` receives tensors, a tile, an mbarrier and the thread."""

    @T.prim_func
    def program(x: T.Tensor((256,), "float32"), y: T.Tensor((128,), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((128,), "float32")
            ready = T.alloc_barrier(128)
            W.fence("gpu")
            body(x, y, tile, ready, T.get_thread_binding())

    with print_verdict(name):
        tw.emit(program)


@T.macro
def producers_first(x, y, tile, ready, tx):
    if tx >= 128:
        produce(x, tile, ready, tx)
    if tx < 128:
        consume(y, tile, ready, tx)


@T.macro
def consumers_first(x, y, tile, ready, tx):
    if tx < 128:
        consume(y, tile, ready, tx)
    else:
        produce(x, tile, ready, tx)


@T.macro
def consumers_before(x, y, tile, ready, tx):
    if tx < 128:
        consume(y, tile, ready, tx)
    if tx >= 128:
        produce(x, tile, ready, tx)


@T.macro
def arrival_after_barrier(x, y, tile, ready, tx):
    if tx < 128:
        T.barrier_wait(ready, 0)
    T.sync_threads()
    if tx >= 128:
        T.barrier_arrive(ready)


@T.macro
def arrival_of_others(x, y, tile, ready, tx):
    if tx < 128:
        T.barrier_wait(ready, 0)
        T.sync_threads(3, 128)
    if tx >= 128:
        T.barrier_arrive(ready)


# CHECK: in order: accepted
of_two_roles("in order", producers_first)
# CHECK: cases: accepted
of_two_roles("cases", consumers_first)
# CHECK: branches: accepted
of_two_roles("branches", consumers_before)
# CHECK: after barrier: T.sync_threads: threads wait for an mbarrier before it, at which others arrive after it; expected the arrival before the barrier, or the wait after it
# CHECK-NEXT: wait --> {{.*}}sync_shared_memory-refused.py:
# CHECK-NEXT: arrival --> {{.*}}sync_shared_memory-refused.py:
of_two_roles("after barrier", arrival_after_barrier)
# CHECK: of others: accepted
of_two_roles("of others", arrival_of_others)
