# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Padding in T.Pipelined keeps the waits of the loads with the consumers, so it belongs before."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, in_loop):
    """Compile a program whose block 0 pads the rows that block 1 reads in a pipelined loop."""

    @T.prim_func
    def program(X: T.Tensor((64, 256), "float16"), Y: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(2, threads=128) as block:
            inbox = W.alloc_packed(rows=256, row=64, dtype="float16")
            tile = T.alloc_shared((64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            me = W.rank()
            T.clear(total)
            if not in_loop:
                if block == 0:
                    W.pad(inbox[me, 0, 0], 256)
            for k in T.Pipelined(4, num_stages=2):
                if in_loop:
                    if block == 0:
                        W.pad(inbox[me, k * 64, 0], 64)
                if block == 1:
                    T.copy(inbox[me, k * 64, 0], tile)
                else:
                    T.copy(X[0, k * 64], tile)
                T.gemm(tile, tile, total)
            T.copy(total, Y[block, 0, 0])

    with print_verdict(name):
        tw.emit(program, world_size=2, arch="sm_90a")


# "After the loads" would deadlock if they wait for these rows.
# CHECK: in_loop: the wait that the compiler inserts for the read of inbox: loads of T.Pipelined overtake it, because pad before it keeps it in the consumer warps; expected pad before T.Pipelined, or T.serial (the compiler keeps it beside the read of inbox, which you can move)
# LINE: CHECK: hoist_waits-pad.py:[[# @LINE - 12]]
# LINE: CHECK: hoist_waits-pad.py:[[# @LINE - 16]]
show("in_loop", True)

# CHECK: before_loop: accepted
show("before_loop", False)
