# RUN: %python %s | %filecheck %s
"""Values that threads compute before a specialized loop, and read before and after it."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, before, after):
    @T.prim_func
    def program(
        A: T.Tensor((2, 64, 64), "float32"),
        X: T.Tensor((256,), "float32"),
        Y: T.Tensor((256,), "float32"),
        Z: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float32")
            total = T.alloc_fragment((64, 64), "float32")
            value = T.alloc_local((1,), "float32")
            thread = T.get_thread_binding()
            W.fence("gpu")
            value[0] = 0
            before(X, Y, value, thread)
            Y[128 + thread] = value[0]
            T.clear(total)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[k, 0, 0], tile)
                for i, j in T.Parallel(64, 64):
                    total[i, j] += tile[i, j]
            T.copy(total, Z)
            after(X, Y, value, thread)
            Y[thread] = value[0]

    with print_verdict(name):
        tw.emit(program, arch="sm_90a", pass_configs={"tileweave.verify": "off"})


@T.macro
def load(X, Y, value, thread):
    value[0] = X[thread]


@T.macro
def select(X, Y, value, thread):
    if thread // 32 == 1:
        value[0] = 1


@T.macro
def load_lane(X, Y, value, thread):
    value[0] = X[thread % 32]


@T.macro
def nothing(X, Y, value, thread):
    pass


# CHECK: loaded: value: its value depends on the thread index, and is read before T.Pipelined and later, when warps with other indices execute the program; expected it to be computed again, or shared memory
# LINE: CHECK-NEXT: assignment --> {{.*}}verify_thread_values-places.py:[[# @LINE - 20]]
# LINE: CHECK-NEXT: read --> {{.*}}verify_thread_values-places.py:[[# @LINE - 29]]
show("loaded", load, nothing)
# CHECK: selected: value: its value depends on the thread index
show("selected", select, nothing)
# CHECK: again: accepted
show("again", load, load)
# Lanes do not change, because the number of producers is a multiple of 32.
# CHECK: lanes: accepted
show("lanes", load_lane, nothing)
