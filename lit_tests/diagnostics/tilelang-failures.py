# REQUIRES: since-0.1.14
# RUN: %python %s | %filecheck %s
"""Programs that TileLang fails to compile are refused with the statement, its line and a remedy."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


def refused(name, body, shape=(32, 64), threads=128, dtype="float32", arch="sm_90a"):
    """Compile a program whose ``body`` receives tensors, two tiles and three fragments."""

    @T.prim_func
    def program(
        X: T.Tensor(shape, dtype),
        Y: T.Tensor(shape, dtype),
        parts: T.Tensor((4, *shape), dtype),
    ):
        with T.Kernel(1, threads=threads):
            W.fence("gpu")
            a, b = T.alloc_shared(shape, dtype), T.alloc_shared(shape, dtype)
            f, g = T.alloc_fragment(shape, dtype), T.alloc_fragment(shape, dtype)
            T.copy(X, a)
            body(X, Y, parts, a, b, f, g)
            T.copy(a, Y)

    with print_verdict(name):
        tw.emit(program, arch=arch, pass_configs={"tileweave.verify": "off"})


@T.macro
def add(X, Y, parts, a, b, f, g):
    T.copy(a, f)
    for i, j in T.Parallel(*f.shape):
        f[i, j] = f[i, j] + a[i, j]
    T.copy(f, a)


# CHECK-LABEL: threads: assignment to f: TileLang does not divide f of shape (32, 64) evenly among 384 threads; expected extents and a number of threads that are powers of two
refused("threads", add, threads=384)


@T.macro
def before_pipeline(X, Y, parts, a, b, f, g):
    T.copy(a, f)
    T.copy(f, Y)
    for k in T.Pipelined(4, num_stages=2):
        T.copy(parts[k, 0, 0], b)
        T.copy(b, Y)


# CHECK-LABEL: producers: T.copy: TileLang does not divide f of shape (32, 64) evenly among 384 threads, which a block has with the producer warps of T.Pipelined; expected threads=128, or T.serial
refused("producers", before_pipeline, threads=256)
# CHECK: fewer: accepted
refused("fewer", before_pipeline, threads=128)


@T.macro
def reduce_rows(X, Y, parts, a, b, f, g):
    T.copy(a, f)
    rows = T.alloc_fragment((f.shape[0],), f.dtype)
    T.reduce_sum(f, rows, dim=1)
    for i, j in T.Parallel(*f.shape):
        a[i, j] = rows[i]


# CHECK-LABEL: rows: T.reduce: TileLang does not divide f of shape (4, 48) evenly among 96 threads; expected extents and a number of threads that are powers of two, with added elements that do not change the result
# CHECK-NEXT: T.copy --> {{.*}}tilelang-failures.py:[[# @LINE - 8]]
# CHECK-NEXT: T.reduce --> {{.*}}tilelang-failures.py:[[# @LINE - 7]]
refused("rows", reduce_rows, (4, 48), 96)
# CHECK: padded: accepted
refused("padded", reduce_rows, (4, 64), 128)


@T.macro
def reduce_tile(X, Y, parts, a, b, f, g):
    rows = T.alloc_fragment((f.shape[0],), f.dtype)
    T.reduce_sum(a, rows, dim=1)
    for i, j in T.Parallel(*f.shape):
        a[i, j] = rows[i]


# The statements of TileLang's macro have the line of the program.
# CHECK-LABEL: tile: T.reduce: TileLang does not divide
# CHECK: T.reduce --> {{.*}}tilelang-failures.py:[[# @LINE - 7]]
refused("tile", reduce_tile, (4, 48), 96)


@T.macro
def transposed(X, Y, parts, a, b, f, g):
    c = T.alloc_fragment(f.shape, "float32")
    d = T.alloc_fragment(f.shape, "float32")
    T.gemm(a, a, c, transpose_B=True, clear_accum=True)
    T.gemm(a, a, d, clear_accum=True)
    for i, j in T.Parallel(*f.shape):
        d[i, j] = c[j, i]
    T.copy(d, a)


# CHECK-LABEL: conflict: assignment to d: TileLang finds no layout of
refused("conflict", transposed, (64, 64), dtype="float16")


@T.macro
def two_indices(X, Y, parts, a, b, f, g):
    rows = T.alloc_fragment((f.shape[0],), f.dtype)
    T.copy(a, f)
    T.reduce_sum(f, rows, dim=1)
    for i, j in T.Parallel(*f.shape):
        f[i, j] += rows[i] * rows[j]
    T.copy(f, a)


# CHECK-LABEL: indices: assignment to f: indexes the fragment rows by (j,) and (i,), which are of different threads; expected one index of rows in a loop, or a copy of rows in shared memory for the other one
refused("indices", two_indices, (64, 64))


@T.macro
def one_column(X, Y, parts, a, b, f, g):
    T.copy(a, f)
    for i in T.Parallel(f.shape[0]):
        a[i, 0] = f[i, 18]


# CHECK-LABEL: column: {{.*}}the index 18 selects elements of a fragment
refused("column", one_column)


@T.macro
def unused(X, Y, parts, a, b, f, g):
    T.clear(f)


# CHECK-LABEL: unused: T.fill: TileLang finds no layout of f in registers, because no other statement uses its elements; expected a statement that reads f, or none that writes it
refused("unused", unused)


@T.macro
def fill_rows(X, Y, parts, a, b, f, g):
    T.fill(a[1:18, 0:32], 1)


# CHECK-LABEL: fill: T.fill: TileLang does not divide 17 x 32 elements of a evenly among 128 threads; expected an assignment in T.Parallel, in which some threads may have fewer elements
refused("fill", fill_rows)


@T.macro
def sum_to_fragment(X, Y, parts, a, b, f, g):
    T.cumsum(src=a, dst=f, dim=1)
    T.copy(f, a)


# CHECK-LABEL: scan: T.cumsum: reads a tile in shared memory and writes the fragment f; expected another tile in shared memory, and T.copy from there to f
refused("scan", sum_to_fragment)


@T.macro
def shared_bound(X, Y, parts, a, b, f, g):
    for _ in T.serial(a[0, 0]):
        T.copy(X, b)
        T.copy(b, Y)


# CHECK-LABEL: bound: T.serial: the number of iterations depends on a[0, 0] in shared memory; expected a variable: n = a[0, 0] before the loop, and n in place of a[0, 0]
# CHECK-NEXT: --> {{.*}}tilelang-failures.py:[[# @LINE - 6]]
refused("bound", shared_bound, dtype="int32")


@T.macro
def multiply(X, Y, parts, a, b, f, g):
    narrow = T.alloc_shared((a.shape[1], 24), a.dtype)
    c = T.alloc_fragment((a.shape[0], 24), "float32")
    T.clear(narrow)
    T.gemm(a, narrow, c, clear_accum=True)
    T.copy(c, Y[0 : a.shape[0], 0:24])


# CHECK-LABEL: wgmma: T.gemm: TileLang has no wgmma layout of narrow of shape (64, 24), whose rows are not along k; expected rows of a multiple of 16 elements, or the transposed operand (transpose_A, transpose_B)
refused("wgmma", multiply, (64, 64), dtype="float16")
# CHECK-LABEL: warps: T.gemm: M=32, N=24 cannot be evenly covered by 12 warps (policy=Square); expected a number of threads or a shape of tiles such that each warp has a multiple of 16 rows and 8 columns
refused("warps", multiply, (32, 64), 384, dtype="float16")


@T.macro
def multiply_short(X, Y, parts, a, b, f, g):
    c = T.alloc_fragment((24, 24), "float32")
    T.gemm(a[0:24, :], a[0:24, :], c, transpose_B=True, clear_accum=True)
    for i, j in T.Parallel(24, 24):
        Y[i, j] = c[i, j]


# CHECK-LABEL: divisor: T.gemm: M is 24; expected a multiple of 16
refused("divisor", multiply_short, dtype="float16")


@T.macro
def unequal(X, Y, parts, a, b, f, g):
    T.copy(X[0:32, 0:64], a[0:32, 0:40])


# CHECK-LABEL: unequal: T.copy: copies 32 x 64 elements of X to 32 x 40 elements of a; expected equal extents on both sides
# CHECK-NEXT: --> {{.*}}tilelang-failures.py:[[# @LINE - 4]]
refused("unequal", unequal)


@T.macro
def part_of_warp(X, Y, parts, a, b, f, g):
    tx = T.get_thread_binding()
    if tx < 48:
        a[0, tx] = X[0, tx]
        Y[1, tx] = a[0, 47 - tx]


# CHECK-LABEL: part_of_warp: assignment to Y: needs a barrier under a condition that only a part of a warp fulfills; expected a condition that whole warps of 32 threads fulfill, or the accesses of other threads' elements outside of it
refused("part_of_warp", part_of_warp)


@T.macro
def of_other_ranks(X, Y, parts, a, b, f, g):
    c = T.alloc_shared((2, 64, 32), "float32")
    T.transpose(a, c[0, :, :])


# CHECK-LABEL: other: T.transpose: TileLang 0.1.15 fails: Transpose source and destination ranks must match; expected another form of this statement
# CHECK-NEXT: --> {{.*}}tilelang-failures.py:[[# @LINE - 4]]
refused("other", of_other_ranks)
