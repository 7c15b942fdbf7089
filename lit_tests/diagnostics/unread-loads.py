# REQUIRES: since-0.1.14
# RUN: %python %s | %filecheck %s
"""Loads of T.Pipelined that no statement of their iteration waits for."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, read, arch="sm_90a"):
    """Compile a program whose loop loads two tiles; ``read`` reads them or not."""

    @T.prim_func
    def program(X: T.Tensor((4, 128), "int32"), Y: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            tile, other = T.alloc_shared((128,), "int32"), T.alloc_shared((128,), "int32")
            total = T.alloc_fragment((128,), "int32")
            W.fence("gpu")
            T.clear(total)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(X[k, 0], tile)
                T.copy(X[3 - k, 0], other)
                read(tile, other, total)
            T.copy(total, Y)

    with print_verdict(name):
        tw.emit(program, arch=arch)


@T.macro
def both(tile, other, total):
    for i in T.Parallel(128):
        total[i] += tile[i] * other[i]


@T.macro
def one(tile, other, total):
    for i in T.Parallel(128):
        total[i] += tile[i]


# CHECK: both: accepted
show("both", both)
# CHECK: one: shared memory: a write of other after a write of other by a bulk load that may not have ended; expected a wait between both, or T.serial; T.Pipelined waits before a statement of the same iteration that reads other
# CHECK-NEXT: before --> {{.*}}unread-loads.py:[[# @LINE - 23]]
show("one", one)
# CHECK: sm_80: shared memory: a write of other after a write of other by a cp.async that may not have ended
# CHECK-NEXT: before --> {{.*}}unread-loads.py:[[# @LINE - 26]]
show("sm_80", one, "sm_80")
