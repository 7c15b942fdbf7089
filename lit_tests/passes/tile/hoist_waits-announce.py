# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""An announcement in T.Pipelined keeps the waits of the loads with the consumers."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, in_loop):
    """Compile a program whose block 0 announces the rows that block 1 reads in a pipelined loop."""

    @T.prim_func
    def program(X: T.Tensor((64, 256), "float16"), Y: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(2, threads=128) as block:
            inbox = W.alloc_ragged(4, rows=64, row=64, dtype="float16")
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            me = W.rank()
            T.clear(total)
            if block == 0:
                for e in T.serial(4):
                    for i, j in T.Parallel(64, 64):
                        inbox[1 - me, e, me, i, j] = X[i, e * 64 + j]
                    if not in_loop:
                        W.announce(inbox[1 - me, e, me, 0, 0], 64)
            for k in T.Pipelined(4, num_stages=2):
                if in_loop:
                    if block == 0:
                        W.announce(inbox[1 - me, k, me, 0, 0], 64)
                if block == 1:
                    T.copy(inbox[me, k, 1 - me, 0, 0], tile)
                else:
                    T.copy(X[0, k * 64], tile)
                T.gemm(tile, tile, total)
            T.copy(total, Y[block, 0, 0])

    with print_verdict(name):
        tw.emit(program, world_size=2, arch="sm_90a")


# "After the loads" would deadlock if they wait for these rows.
# CHECK: in_loop: the wait that the compiler inserts for the read of inbox_announced: loads of T.Pipelined overtake it, because announce before it keeps it in the consumer warps; expected announce before T.Pipelined, or T.serial (the compiler keeps it beside the read of inbox
# LINE: CHECK: hoist_waits-announce.py:[[# @LINE - 12]]
# LINE: CHECK: hoist_waits-announce.py:[[# @LINE - 16]]
show("in_loop", True)

# CHECK: before_loop: accepted
show("before_loop", False)
