# RUN: %python %s | %filecheck %s
"""A block of several axes must not repeat what changes memory again, once for each row."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def show(name, run, threads=(32, 4)):
    @T.prim_func
    def program(X: T.Tensor((4, 256), "float32"), S: T.Tensor((4, 256), "float32")):
        with T.Kernel(1, threads=threads):
            tile = T.alloc_shared((256,), "float32")
            part = T.alloc_fragment((256,), "float32")
            T.copy(X[0, 0:256], tile)
            T.copy(tile, part)
            run(X, S, tile, part, T.get_thread_binding(1))
            W.fence("gpu")

    with print_verdict(name):
        tw.emit(program, stage="tile")


@T.macro
def add(X, S, tile, part, row):
    for i in T.Parallel(256):
        T.atomic_add(S[0, i], tile[i])


# CHECK: add: T.atomic_add: executed 4 times with threads=(32, 4), because TileLang divides work among the threads of the first axis only; expected threads=128
# LINE: CHECK-NEXT: --> {{.*}}verify_thread_axes-repeated.py:[[# @LINE - 4]]
show("add", add)

# CHECK: three_axes: T.atomic_add: executed 4 times with threads=(32, 2, 2), because {{.*}}; expected threads=128
show("three_axes", add, (32, 2, 2))

# CHECK: second_axis: T.atomic_add: executed 2 times with threads=(128, 2), because {{.*}}; expected threads=256
show("second_axis", add, (128, 2))

# CHECK: one_axis: accepted
show("one_axis", add, 128)

# CHECK: one_row: accepted
show("one_row", add, (128, 1))


@T.macro
def add_tile(X, S, tile, part, row):
    T.atomic_add(S[0, 0:256], tile)


# CHECK: add_tile: T.atomic_add: executed 4 times
show("add_tile", add_tile)


@T.macro
def add_by_tma(X, S, tile, part, row):
    T.atomic_add(S[0, 0:256], tile, use_tma=True)


# One thread issues it (elect_once).
# CHECK: add_by_tma: accepted
show("add_by_tma", add_by_tma)


@T.macro
def add_builtin(X, S, tile, part, row):
    for i in T.Parallel(256):
        W.red_add(S[0, i], tile[i])


# CHECK: add_builtin: red_add: executed 4 times
show("add_builtin", add_builtin)


@T.macro
def maximum(X, S, tile, part, row):
    for i in T.Parallel(256):
        T.atomic_max(S[0, i], tile[i])


# A maximum is the same after a repetition.
# CHECK: maximum: accepted
show("maximum", maximum)


@T.macro
def add_by_threads(X, S, tile, part, row):
    T.atomic_add(S[0, 0], 1)


# Outside of tiles, each thread executes the operation.
# CHECK: add_by_threads: accepted
show("add_by_threads", add_by_threads)


@T.macro
def add_in_a_row(X, S, tile, part, row):
    if row == 0:
        for i in T.Parallel(256):
            T.atomic_add(S[0, i], tile[i])


# CHECK: add_in_a_row: accepted
show("add_in_a_row", add_in_a_row)


@T.macro
def add_rows(X, S, tile, part, row):
    for i in T.Parallel(256):
        T.atomic_add(S[row, i], tile[i])


# CHECK: add_rows: accepted
show("add_rows", add_rows)


@T.macro
def add_parts(X, S, tile, part, row):
    for i in T.Parallel(256):
        part[i] += X[row, i]
    for i in T.Parallel(256):
        T.atomic_add(S[0, i], part[i])


# Each row adds its own part.
# CHECK: add_parts: accepted
show("add_parts", add_parts)


@T.macro
def update(X, S, tile, part, row):
    for i in T.Parallel(256):
        tile[i] += 1


# CHECK: update: update of tile: executed 4 times with threads=(32, 4), because {{.*}}; expected threads=128
# LINE: CHECK-NEXT: --> {{.*}}verify_thread_axes-repeated.py:[[# @LINE - 4]]
show("update", update)


@T.macro
def update_by_name(X, S, tile, part, row):
    for i in T.Parallel(256):
        value = tile[i]
        tile[i] = value * 2


# CHECK: update_by_name: update of tile: executed 4 times
show("update_by_name", update_by_name)


@T.macro
def update_rows(X, S, tile, part, row):
    for i in T.Parallel(256):
        X[row, i] += 1


# CHECK: update_rows: accepted
show("update_rows", update_rows)


@T.macro
def update_parts(X, S, tile, part, row):
    for i in T.Parallel(256):
        part[i] += 1


# Each row has its own fragment.
# CHECK: update_parts: accepted
show("update_parts", update_parts)


@T.macro
def write(X, S, tile, part, row):
    for i in T.Parallel(256):
        S[0, i] = tile[i] + 1
    W.fence("gpu")


# CHECK: write: accepted
show("write", write)


@T.macro
def scan_in_place(X, S, tile, part, row):
    T.cumsum(tile)


# CHECK: scan_in_place: T.cumsum in place: executed 4 times
show("scan_in_place", scan_in_place)


@T.macro
def pipelined(X, S, tile, part, row):
    for step in T.Pipelined(4, num_stages=2):
        T.copy(X[step, 0:256], tile)
        for i in T.Parallel(256):
            part[i] += tile[i]


# CHECK: pipelined: T.Pipelined: executed 4 times with threads=(32, 4), because {{.*}}; expected threads=128
# LINE: CHECK-NEXT: --> {{.*}}verify_thread_axes-repeated.py:[[# @LINE - 7]]
show("pipelined", pipelined)

# CHECK: pipelined_one_axis: accepted
show("pipelined_one_axis", pipelined, 128)


@T.macro
def serial(X, S, tile, part, row):
    for step in T.Pipelined(4, num_stages=0):
        T.copy(X[step, 0:256], tile)
        for i in T.Parallel(256):
            part[i] += tile[i]


# CHECK: serial: accepted
show("serial", serial)
