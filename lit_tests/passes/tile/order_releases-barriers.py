# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""One block barrier precedes a release, at a place that the whole block reaches."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W


@T.prim_func
def own_barrier(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        T.sync_threads()
        W.signal(F[1, 0])


# The program's barrier is sufficient.
# CHECK-LABEL: TEST: own_barrier
# CHECK: complete_bulk_stores()
# CHECK-NEXT: tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 0
# CHECK-NOT: tvm_storage_sync
show(own_barrier, stage="tile")


@T.prim_func
def partial_barrier(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        T.sync_threads(1, 64)
        W.signal(F[1, 0])


# A named barrier of some threads is not sufficient.
# CHECK-LABEL: TEST: partial_barrier
# CHECK: tvm_storage_sync("shared", 1, 64)
# CHECK: tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 0
show(partial_barrier, stage="tile")


@T.prim_func
def guarded(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        thread = T.get_thread_binding()
        if thread < 64:
            if thread == 3:
                W.red_add(F[1, 0], 1, scope="sys", sem="release")


# CHECK-LABEL: TEST: guarded
# CHECK: tvm_storage_sync("shared")
# CHECK-NEXT: if thread < 64:
# CHECK-NEXT: if thread == 3:
# CHECK-NEXT: tileweave.red_add(
# CHECK-NOT: tvm_storage_sync
show(guarded, stage="tile")


@T.prim_func
def in_loop(S: W.Symmetric((8, 128), "float32"), F: W.Symmetric((8,), "uint32"), n: T.int32):
    with T.Kernel(1, threads=128):
        T.sync_threads()
        for i in T.serial(n):
            S[1, i, T.get_thread_binding()] = 1.0
            W.red_add(F[1, 0], 1, sem="release")


# Each iteration publishes its own stores, so a barrier before the loop is not sufficient.
# CHECK-LABEL: TEST: in_loop
# CHECK: for i in range(n):
# CHECK-NEXT: S[1, i, tx]
# CHECK-NEXT: complete_bulk_stores()
# CHECK-NEXT: tvm_storage_sync("shared")
# CHECK-NEXT: tileweave.red_add(
show(in_loop, stage="tile")


@T.prim_func
def to_all(S: W.Symmetric((8, 128), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        S[1, 0, T.get_thread_binding()] = 1.0
        for step in T.serial(7):
            peer = (W.rank() + 1 + step) % 8
            if peer != 3:
                W.signal(F[peer, 0])


# The loop only releases, so one barrier before it is sufficient for all iterations.
# CHECK-LABEL: TEST: to_all
# CHECK: S[1, 0, tx]
# CHECK-NEXT: complete_bulk_stores()
# CHECK-NEXT: tvm_storage_sync("shared")
# CHECK-NEXT: for step in range(7):
# CHECK-NOT: tvm_storage_sync
# CHECK: tileweave.signal(
# CHECK-NOT: tvm_storage_sync
show(to_all, stage="tile", world_size=8)


@T.prim_func
def stored_between(S: W.Symmetric((8, 128), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        for step in T.serial(7):
            S[step, 0, T.get_thread_binding()] = 1.0
            W.signal(F[step, 0])


# CHECK-LABEL: TEST: stored_between
# CHECK: for step in range(7):
# CHECK: tvm_storage_sync("shared")
# CHECK: tileweave.signal(
show(stored_between, stage="tile", world_size=8)


@T.prim_func
def by_several(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        for step in T.serial(7):
            if T.get_thread_binding() == step:
                W.signal(F[step, 0])


# Another thread releases in each iteration, and publishes the work of the earlier threads.
# CHECK-LABEL: TEST: by_several
# CHECK: for step in range(7):
# CHECK: tvm_storage_sync("shared")
# CHECK: tileweave.signal(
show(by_several, stage="tile", world_size=8)


@T.prim_func
def waits_between(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        for step in T.serial(7):
            W.signal(F[step, 0])
            W.wait_reached(F[0, 0], step)


# CHECK-LABEL: TEST: waits_between
# CHECK: for step in range(7):
# CHECK: tvm_storage_sync("shared")
# CHECK: tileweave.signal(
show(waits_between, stage="tile", world_size=8)


@T.prim_func
def fence(S: W.Symmetric((8,), "float32"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        S[1, 0] = 1.0
        W.fence("sys")
        W.st(F[1, 0], 1)


# A fence orders only its own thread.
# CHECK-LABEL: TEST: fence
# CHECK: complete_bulk_stores()
# CHECK-NEXT: tileweave.fence(
# CHECK-NOT: tvm_storage_sync
show(fence, stage="tile")


@T.prim_func
def fence_by_another(S: W.Symmetric((128, 64), "bfloat16"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((128, 64), "bfloat16")
        T.clear(tile)
        T.copy(tile, S[1, 0, 0])
        T.sync_threads()
        if T.get_thread_binding() == 37:
            W.fence("sys")
            W.st(F[1, 0], 1, scope="sys")


# A thread completes its TMA store before it synchronizes with the releasing thread.
# CHECK-LABEL: TEST: fence_by_another
# CHECK: tl::tma_store(
# CHECK: tw::complete_bulk_stores();
# CHECK: __syncthreads();
# CHECK-NEXT: if (((int)threadIdx.x) == 37) {
# CHECK-NEXT: tw::fence<
# CHECK-NOT: __syncthreads
show(fence_by_another)


@T.prim_func
def relaxed(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        W.red_add(F[1, 0], 1)


# CHECK-LABEL: TEST: relaxed
# CHECK-NOT: complete_bulk_stores
# CHECK-NOT: tvm_storage_sync
# CHECK: tileweave.red_add(
show(relaxed, stage="tile")


@T.prim_func
def in_condition(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        if T.get_thread_binding() == 0:
            if W.atom_add(F[0, 0], 1, sem="acq_rel") == 3:
                W.st(F[1, 0], 1, scope="sys", sem="release")


# The last thread to arrive publishes; the barrier is before both of its releases.
# CHECK-LABEL: TEST: in_condition
# CHECK: tvm_storage_sync("shared")
# CHECK-NEXT: if tx == 0:
# CHECK: tileweave.atom_add(
# CHECK: tileweave.st(
show(in_condition, stage="tile")
