# RUN: %python %s | %filecheck %s
"""All threads of a group execute a reduction, and one row of a block of several axes."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def verdict(name, program):
    with print_verdict(name):
        tw.emit(program, arch="sm_90a")


def show(name, rows, threads):
    @T.prim_func
    def program(X: T.Tensor((rows, 1024), "float32"), Y: T.Tensor((rows,), "float32")):
        with T.Kernel(1, threads=threads):
            values = T.alloc_fragment((rows, 1024), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(X, values)
            T.reduce_sum(values, total, dim=1)
            T.copy(total, Y)
            W.fence("gpu")

    verdict(name, program)


# CHECK: two_rows: T.reduce or T.finalize_reducer: 256 threads meet at barriers that count 128 threads, because TileLang divides work among the threads of the first axis only; expected threads=256
show("two_rows", 1, (128, 2))

# CHECK: one_axis: accepted
show("one_axis", 1, 256)

# Warps exchange nothing.
# CHECK: one_warp: accepted
show("one_warp", 1, (32, 4))


def show_tile(name, rows, threads):
    @T.prim_func
    def program(X: T.Tensor((rows, 8), "int32"), Y: T.Tensor((rows,), "int32")):
        with T.Kernel(1, threads=threads):
            values = T.alloc_shared((rows, 8), "int32")
            least = T.alloc_shared((rows,), "int32")
            T.copy(X, values)
            T.reduce_min(values, least, dim=1)
            T.copy(least, Y)
            W.fence("gpu")

    verdict(name, program)


# 48 elements: threads 103, 111, 119 and 127 would not take part.
# CHECK: uneven: T.reduce: TileLang lets 124 threads reduce among 8 threads each, and a part of them is missing; expected a tile whose size is a multiple or a divisor of the number of threads
show_tile("uneven", 6, 128)

# CHECK: divisor: accepted
show_tile("divisor", 8, 128)

# CHECK: multiple: accepted
show_tile("multiple", 32, 128)
