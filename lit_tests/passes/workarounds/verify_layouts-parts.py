# RUN: %python %s | %filecheck %s
"""A fragment must have a register for each element, also if a statement accesses a part of it."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, program):
    with print_verdict(name):
        tw.emit(program, arch="sm_90a")


def first(stored, accessed, limit):
    @T.prim_func
    def program(X: T.Tensor((256,), "int32"), Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=32):
            x = T.alloc_fragment((stored,), "int32")
            for i in T.Parallel(stored):
                x[i] = X[i]
            for i in T.Parallel(accessed):
                if i < limit:
                    x[i] += 1
            T.copy(x, Y[0:stored])
            W.fence("gpu")

    return program


# The layout would have 64 elements.
# CHECK: smaller: x of shape (256,): TileLang stores only a part of its elements in registers, because a statement accesses only a part; expected T.Parallel over all elements with a condition, such as if i < n, or a fragment of the size of the part
# LINE: CHECK-NEXT: --> {{.*}}verify_layouts-parts.py:[[# @LINE - 11]]
show("smaller", first(256, 64, 64))

# CHECK: condition: accepted
show("condition", first(256, 256, 64))

# CHECK: part: accepted
show("part", first(64, 64, 64))


def rows(offset):
    @T.prim_func
    def program(X: T.Tensor((8, 64), "int32"), Y: T.Tensor((8, 64), "int32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((8, 64), "int32")
            sums = T.alloc_shared((8, 64), "int32")
            T.copy(X, x)
            T.clear(sums)
            for i, j in T.Parallel(4, 64):
                sums[i + offset, j] += x[i + offset, j]
            T.copy(x, Y)
            W.fence("gpu")

    return program


# The layout would place row i in threads 32 * (i - 3) to 32 * (i - 3) + 31, of which 128 exist.
# CHECK: threads: x of shape (8, 64): TileLang stores only a part
# LINE: CHECK-NEXT: --> {{.*}}verify_layouts-parts.py:[[# @LINE - 10]]
show("threads", rows(3))


@T.prim_func
def vector(X: T.Tensor((24,), "int32"), Y: T.Tensor((24,), "int32")):
    with T.Kernel(1, threads=128):
        x = T.alloc_fragment((24,), "int32")
        tile = T.alloc_fragment((24, 24), "int32")
        T.copy(X, x)
        T.clear(tile)
        for i, j in T.Parallel(24, 24):
            tile[i, j] += x[i]
        T.copy(x, Y)
        W.fence("gpu")


# CHECK: vector: accepted
show("vector", vector)
