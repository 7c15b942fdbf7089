# RUN: %python %s | %filecheck %s
"""A bulk_wait completes the bulk stores of its own thread only."""

import tilelang.language as T

from tests.verdicts import show
from tileweave import language as W


@T.prim_func
def leader(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        T.clear(tile)
        W.bulk_store(S[1, 0], tile, 4096)
        W.bulk_commit()
        W.bulk_wait(0)
        W.signal(F[1, 0])


# The leader waits for its own stores.
# CHECK-LABEL: TEST: leader
# CHECK: tw::bulk_wait<0, false>();
# CHECK-NOT: complete_bulk_stores
# CHECK: tw::signal
show(leader)


@T.prim_func
def only_read(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        T.clear(tile)
        W.bulk_store(S[1, 0], tile, 4096)
        W.bulk_commit()
        W.bulk_wait(0, read=True)
        W.signal(F[1, 0])


# CHECK-LABEL: TEST: only_read
# CHECK: tw::bulk_wait<0, true>();
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
show(only_read)


@T.prim_func
def another_thread(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        T.clear(tile)
        if T.get_thread_binding() == 0:
            W.bulk_store(S[1, 0], tile, 4096)
            W.bulk_commit()
        if T.get_thread_binding() == 32:
            W.bulk_wait(0)
        W.signal(F[1, 0])


# CHECK-LABEL: TEST: another_thread
# CHECK: tw::bulk_wait<0, false>();
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
show(another_thread)


@T.prim_func
def uncommitted(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        T.clear(tile)
        W.bulk_store(S[1, 0], tile, 4096)
        W.bulk_wait(0)
        W.signal(F[1, 0])


# A wait does not cover a store outside of a group, so complete_bulk_stores commits first.
# CHECK-LABEL: TEST: uncommitted
# CHECK: tw::bulk_wait<0, false>();
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
show(uncommitted)


@T.prim_func
def own_release(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((4096,), "uint8")
        T.clear(tile)
        if T.get_thread_binding() == 0:
            W.bulk_store(S[1, 0], tile, 4096)
            W.signal(F[1, 0])


# A thread that stores and releases under one condition completes its own stores.
# CHECK-LABEL: TEST: own_release
# CHECK: tw::bulk_store(
# CHECK-NEXT: tw::complete_bulk_stores();
# CHECK-NEXT: tw::signal
show(own_release)
