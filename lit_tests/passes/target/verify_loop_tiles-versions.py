# RUN: %python %s | %filecheck %s
"""A tile of which T.Pipelined has several versions must not be used outside of the loop."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, before, after, arch="sm_90a", stages=2, load=None, other=None):
    """Compile a program that uses the tile of a pipelined loop before or after it.

    Args:
        load, other: statement that loads the tile, and one that uses it, in the loop.
    """
    load, other = load or copy, other or multiply

    @T.prim_func
    def program(
        X: T.Tensor((64, 256), "float16"),
        Y: T.Tensor((64, 64), "float32"),
        Z: T.Tensor((64, 64), "float16"),
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            W.fence("gpu")
            T.clear(total)
            before(X, Z, tile, total)
            for k in T.Pipelined(4, num_stages=stages):
                load(X, tile, k)
                other(tile, total)
            after(X, Z, tile, total)
            T.copy(total, Y)

    with print_verdict(name):
        tw.emit(program, arch=arch)


@T.macro
def copy(X, tile, k):
    T.copy(X[0, k * 64], tile)


@T.macro
def multiply(tile, total):
    T.gemm(tile, tile, total)


@T.macro
def add(tile, total):
    for i, j in T.Parallel(64, 64):
        total[i, j] += tile[i, j]


@T.macro
def nothing(X, Z, tile, total):
    T.evaluate(0)


@T.macro
def fill(X, Z, tile, total):
    T.fill(tile, 0)


@T.macro
def store(X, Z, tile, total):
    T.copy(tile, Z)


@T.macro
def use(X, Z, tile, total):
    for i, j in T.Parallel(64, 64):
        total[i, j] += tile[i, j]


# CHECK: before: T.fill: uses tile, of which T.Pipelined has a version for each stage, outside of this loop; expected another tile, or T.serial
# LINE: CHECK-NEXT: use --> {{.*}}verify_loop_tiles-versions.py:[[# @LINE - 15]]
# LINE: CHECK-NEXT: T.Pipelined --> {{.*}}verify_loop_tiles-versions.py:[[# @LINE - 49]]
show("before", fill, nothing)

# CHECK: after: T.copy: uses tile, of which T.Pipelined has a version for each stage
show("after", nothing, store)

# CHECK: without_tma: T.copy: uses tile, of which T.Pipelined has a version for each stage
show("without_tma", nothing, store, arch="sm_80")

# TileLang does not report this use; it reads the memory after the tile.
# CHECK: elements: assignment to total: uses tile, of which T.Pipelined has a version for each stage
show("elements", nothing, use, arch="sm_80", other=add)

# CHECK: not_used: accepted
show("not_used", nothing, nothing)

# CHECK: one_stage: accepted
show("one_stage", nothing, store, stages=1)

# CHECK: serial: accepted
show("serial", fill, store, stages=0)


@T.macro
def computed(X, tile, k):
    T.fill(tile, k)


# A tile that the loop does not load has one version.
# CHECK: computed: accepted
show("computed", fill, store, load=computed)


@T.macro
def load_again(X, Z, tile, total):
    for k in T.Pipelined(4, num_stages=2):
        T.copy(X[0, k * 64], tile)
        T.gemm(tile, tile, total)


# CHECK: two_loops: T.copy: uses tile, of which T.Pipelined has a version for each stage
# LINE: CHECK-NEXT: use --> {{.*}}verify_loop_tiles-versions.py:[[# @LINE - 5]]
# LINE: CHECK-NEXT: T.Pipelined --> {{.*}}verify_loop_tiles-versions.py:[[# @LINE - 91]]
show("two_loops", load_again, nothing)

# Without producer warps, loops with the same versions may load one tile.
# CHECK: two_loops_without_tma: accepted
show("two_loops_without_tma", load_again, nothing, arch="sm_80")

# CHECK: other_stages: T.copy: uses tile, of which T.Pipelined has a version for each stage
show("other_stages", load_again, nothing, arch="sm_80", stages=3)

# CHECK: one_stage_later: accepted
show("one_stage_later", load_again, nothing, stages=1)


@T.macro
def load_in_loop(X, tile, k):
    for part in T.serial(2):
        T.copy(X[part * 32, k * 64], tile[part * 32 : part * 32 + 32, :])


# Only loads without the TMA in an inner loop are pipelined.
# CHECK: inner_loop: accepted
show("inner_loop", nothing, store, load=load_in_loop)

# CHECK: inner_loop_without_tma: T.copy: uses tile, of which T.Pipelined has a version for each stage
show("inner_loop_without_tma", nothing, store, load=load_in_loop, arch="sm_80")


@T.prim_func
def local(
    X: T.Tensor((64, 256), "float16"), S: W.Symmetric((64, 64), "float16"),
    Y: T.Tensor((64, 64), "float32"),
):  # fmt: skip
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((64, 64), "float16")
        total = T.alloc_fragment((64, 64), "float32")
        T.clear(total)
        for k in T.Pipelined(4, num_stages=2):
            T.copy(X[0, k * 64], tile)
            add(tile, total)
        use(X, X, tile, total)
        T.copy(total, Y)


# A program with a symmetric tensor that calls no builtin.
# CHECK: local: assignment to total: uses tile, of which T.Pipelined has a version for each stage
with print_verdict("local"):
    tw.emit(local, arch="sm_80", world_size=2)
