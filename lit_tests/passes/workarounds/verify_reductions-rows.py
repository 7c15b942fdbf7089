# RUN: %python %s | %filecheck %s
"""A reduction between warps must not be executed by several rows of a block of several axes."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


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

    try:
        tw.emit(program, arch="sm_90a")
    except tw.LanguageError as error:
        print(f"{name}: {error}")
    else:
        print(f"{name}: accepted")


# CHECK: two_rows: T.reduce or T.finalize_reducer: 256 threads meet at barriers that count 128 threads, because TileLang divides work among the threads of the first axis only; expected threads=256
show("two_rows", 1, (128, 2))

# CHECK: one_axis: accepted
show("one_axis", 1, 256)

# Warps exchange nothing.
# CHECK: one_warp: accepted
show("one_warp", 1, (32, 4))
