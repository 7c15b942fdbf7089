# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Statements before a specialized loop that access its fragments, by its consumers only."""

import tilelang.language as T

from tests.verdicts import show_unordered as show
from tileweave import language as W

D, S = 128, 256


def two_uses(dtype, name):
    @T.prim_func
    def program(
        q: T.Tensor((S, D), dtype), k: W.Symmetric((S, D), "bfloat16"), o: T.Tensor((S, D), dtype)
    ):
        with T.Kernel(2, threads=256) as block:
            K = T.alloc_shared((128, D), "bfloat16")
            kept = T.alloc_shared((128, D), dtype)
            tile = T.alloc_fragment((128, D), dtype)
            scores = T.alloc_fragment((128, 128), "float32")
            T.copy(q[block * 128, 0], tile)
            T.copy(tile, kept)
            for j in T.Pipelined(2, num_stages=2):
                T.copy(k[W.rank(), j * 128, 0], K)
                T.gemm(K, K, scores, transpose_B=True, clear_accum=True)
                for a, b in T.Parallel(128, D):
                    tile[a, b] += scores[a, b]
            T.copy(tile, o[block * 128, 0])

    return program.with_attr("global_symbol", name)


# stmatrix has no guard of its own.
# CHECK-LABEL: TEST: two_uses{{$}}
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: tl::ptx_stmatrix
# CHECK: for (int j = 0; j < 2
show(two_uses("bfloat16", "two_uses"))

# CHECK-LABEL: TEST: two_uses_of_floats
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: )kept)
# CHECK: for (int j = 0; j < 2
show(two_uses("float32", "two_uses_of_floats"))

# CHECK-LABEL: TEST: two_uses sm_80
# CHECK-NOT: 128 <= ((int)threadIdx.x)
# CHECK: for (int j = 0; j < 2
show(two_uses("bfloat16", "two_uses"), arch="sm_80")


@T.prim_func
def sums(
    X: T.Tensor((32, 32), "float32"),
    B: W.Symmetric((2, 32, 32), "float32"),
    Y: T.Tensor((3, 32, 32), "float32"),
):
    with T.Kernel(1, threads=128):
        tile = T.alloc_shared((32, 32), "float32")
        total = T.alloc_fragment((32, 32), "float32")
        twice = T.alloc_fragment((32, 32), "float32")
        other = T.alloc_fragment((32, 32), "float32")
        T.copy(X, other)
        T.copy(other, Y[0, 0, 0])
        T.copy(X, total)
        for i, j in T.Parallel(32, 32):
            twice[i, j] = total[i, j] * 2
        T.copy(twice, Y[1, 0, 0])
        for s in T.Pipelined(2, num_stages=1):
            T.copy(B[W.rank(), s, 0, 0], tile)
            for i, j in T.Parallel(32, 32):
                total[i, j] += tile[i, j]
        T.copy(total, Y[2, 0, 0])


# `other` is no fragment of the consumers, so all threads have a part of it; `total` is one, and so
# is `twice`. Without the guard, consumers had half of their elements.
# CHECK-LABEL: TEST: sums
# CHECK-DAG: float other[4];
# CHECK-DAG: float total[8];
# CHECK-DAG: float twice[8];
# CHECK: (Y + (((int)threadIdx.x) * 4)) = {{.*}}(other + 0)
# CHECK: if (128 <= ((int)threadIdx.x)) {
# CHECK: (total + {{.*}} = {{.*}}(X +
# CHECK: (Y + {{.*}} = {{.*}}(twice +
# CHECK: if (((int)threadIdx.x) < 128) {
show(sums)
