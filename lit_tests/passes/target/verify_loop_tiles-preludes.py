# RUN: %python %s | %filecheck %s
"""Uses of a tile before T.Pipelined that TileLang moves to the consumers, or before a wait."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
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

    with print_verdict(name):
        tw.emit(program, arch=arch)


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
def load_by_threads_and_add(X, z, tile, total):
    for i, j in T.Parallel(64, 64):
        tile[i, j] = X[i, j]
    for i, j in T.Parallel(64, 64):
        total[i, j] += tile[i, j]


@T.macro
def load_by_threads_and_store(X, z, tile, total):
    values = T.alloc_fragment((64, 64), "float16")
    for i, j in T.Parallel(64, 64):
        tile[i, j] = X[i, j]
    T.copy(tile, values)
    T.copy(values, z)


@T.macro
def load_by_threads_and_convert(X, z, tile, total):
    values = T.alloc_fragment((64, 64), "float16")
    for i, j in T.Parallel(64, 64):
        tile[i, j] = X[i, j]
    T.copy(tile, values)
    for i, j in T.Parallel(64, 64):
        total[i, j] += values[i, j]


# The loop waits for the load, where it first reads the tile.
# CHECK: load: T.copy: uses tile before T.Pipelined, whose producer warps may load tile at the same time; expected another tile, or T.serial
# LINE: CHECK-NEXT: use --> {{.*}}verify_loop_tiles-preludes.py:[[# @LINE - 45]]
# LINE: CHECK-NEXT: T.Pipelined --> {{.*}}verify_loop_tiles-preludes.py:[[# @LINE - 59]]
show("load", load)

# CHECK: loaded_before: accepted
show("loaded_before", load, loads_tile=False)

# CHECK: stored: T.copy: uses tile before T.Pipelined
# LINE: CHECK-NEXT: use --> {{.*}}verify_loop_tiles-preludes.py:[[# @LINE - 47]]
show("stored", load_and_store, loads_tile=False)

# CHECK: added: assignment to total: uses tile before T.Pipelined
show("added", load_and_add, loads_tile=False)

# CHECK: without_tma: accepted
show("without_tma", load_and_add, arch="sm_80")

# TileLang moves no waits into an inner loop.
# CHECK: in_loop: accepted
show("in_loop", load_and_store, in_loop=True)

# The consumers compute what the loop adds to, also in an inner loop.
# SINCE_0_1_13: CHECK: added_in_loop: assignment to total: uses tile before T.Pipelined
show("added_in_loop", load_and_add, in_loop=True)

# CHECK: added_by_threads: assignment to total: uses tile before T.Pipelined
show("added_by_threads", load_by_threads_and_add)

# CHECK: converted: T.copy: uses tile before T.Pipelined
show("converted", load_by_threads_and_convert)

# CHECK: stored_by_threads: accepted
show("stored_by_threads", load_by_threads_and_store)
