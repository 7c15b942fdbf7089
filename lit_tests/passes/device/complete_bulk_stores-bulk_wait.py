# RUN: %python %s | %filecheck %s
"""A bulk_wait completes the bulk stores of its own thread only."""

import tilelang.language as T

from tests import verdicts
from tileweave import language as W


def show(name, run):
    @T.prim_func
    def program(S: W.Symmetric((4096,), "uint8"), F: W.Symmetric((8,), "uint32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((4096,), "uint8")
            T.clear(tile)
            run(S, F, tile)

    verdicts.show(program.with_attr("global_symbol", name))


@T.macro
def leader(S, F, tile):
    W.bulk_store(S[1, 0], tile, 4096)
    W.bulk_commit()
    W.bulk_wait(0)
    W.signal(F[1, 0])


# The leader waits for its own stores.
# CHECK-LABEL: TEST: leader
# CHECK: tw::bulk_wait<0, false>();
# CHECK-NOT: complete_bulk_stores
# CHECK: tw::signal
show("leader", leader)


@T.macro
def only_read(S, F, tile):
    W.bulk_store(S[1, 0], tile, 4096)
    W.bulk_commit()
    W.bulk_wait(0, read=True)
    W.signal(F[1, 0])


# CHECK-LABEL: TEST: only_read
# CHECK: tw::bulk_wait<0, true>();
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
show("only_read", only_read)


@T.macro
def another_thread(S, F, tile):
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
show("another_thread", another_thread)


@T.macro
def uncommitted(S, F, tile):
    W.bulk_store(S[1, 0], tile, 4096)
    W.bulk_wait(0)
    W.signal(F[1, 0])


# A wait does not cover a store outside of a group, so complete_bulk_stores commits first.
# CHECK-LABEL: TEST: uncommitted
# CHECK: tw::bulk_wait<0, false>();
# CHECK: tw::complete_bulk_stores();
# CHECK: tw::signal
show("uncommitted", uncommitted)


@T.macro
def own_release(S, F, tile):
    if T.get_thread_binding() == 0:
        W.bulk_store(S[1, 0], tile, 4096)
        W.signal(F[1, 0])


# A thread that stores and releases under one condition completes its own stores.
# CHECK-LABEL: TEST: own_release
# CHECK: tw::bulk_store(
# CHECK-NEXT: tw::complete_bulk_stores();
# CHECK-NEXT: tw::signal
show("own_release", own_release)
