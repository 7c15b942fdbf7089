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


def half(use, dtype):
    @T.prim_func
    def program(
        A: T.Tensor((64, 64), "float16"), B: T.Tensor((128, 64), "float16"),
        Y: T.Tensor((64, 64), dtype), Z: T.Tensor((64,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            A_tile, B_tile = (
                T.alloc_shared((64, 64), "float16"),
                T.alloc_shared((128, 64), "float16"),
            )
            Y_tile = T.alloc_shared((64, 64), dtype)
            total = T.alloc_fragment((64, 128), "float32")
            left = T.alloc_fragment((64, 64), "float32")
            row = T.alloc_fragment((64,), "float32")
            T.copy(A, A_tile)
            T.copy(B, B_tile)
            T.clear(total)
            T.gemm(A_tile, B_tile, total, transpose_B=True)
            for i, j in T.Parallel(64, 64):
                left[i, j] = total[i, j] * 2.0
            if use == "copy":
                T.copy(left, Y_tile)
            elif use == "copy of the part":
                T.copy(total[:, :64], Y_tile)
            else:
                T.reduce_max(left, row, dim=1)
            T.copy(Y_tile, Y)
            T.copy(row, Z)
            W.fence("gpu")

    return program


# Registers 32 to 63 of each thread are those of no element.
# CHECK: copy: left of shape (64, 64): TileLang gives it all registers of the fragment whose first elements it receives, and T.copy accesses all of them; expected that part of the other fragment, such as total[:, :64], or a fragment of the same shape
# LINE: CHECK-NEXT: --> {{.*}}verify_layouts-parts.py:[[# @LINE - 14]]
show("copy", half("copy", "float16"))

# CHECK: reduce: left of shape (64, 64): TileLang gives it all registers {{.*}}, and T.reduce accesses all of them
show("reduce", half("reduce", "float16"))

# CHECK: words: accepted
show("words", half("copy", "float32"))

# CHECK: copy of the part: accepted
show("copy of the part", half("copy of the part", "float16"))
