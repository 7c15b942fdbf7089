# REQUIRES: since-0.1.13
# RUN: %python %s | %filecheck %s
"""Parts of tiles: copied by threads if the TMA would copy other elements, or refused."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict, show
from tileweave import language as W


@T.prim_func
def columns(X: T.Tensor((32, 80), "float32"), Y: T.Tensor((32, 64), "float32")):
    with T.Kernel(1, threads=128):
        W.fence("gpu")
        tile = T.alloc_shared((32, 80), "float32")
        T.copy(X, tile)
        T.copy(tile[:, 0:64], Y)


# The columns are not contiguous in the tile.
# CHECK-LABEL: TEST: columns
# CHECK-NOT: tma_store
# CHECK: *(float4*)(Y
show(columns, arch="sm_90a")


@T.prim_func
def rows(X: T.Tensor((32, 64), "float32"), Y: T.Tensor((16, 64), "float32")):
    with T.Kernel(1, threads=128):
        W.fence("gpu")
        tile = T.alloc_shared((32, 64), "float32")
        T.copy(X, tile)
        T.copy(tile[16:32, :], Y)


# CHECK-LABEL: TEST: rows
# CHECK: tl::tma_store(
show(rows, arch="sm_90a")


@T.prim_func
def fragment(X: T.Tensor((32, 64), "float32"), Y: T.Tensor((32, 64), "float32")):
    with T.Kernel(1, threads=128):
        W.fence("gpu")
        x = T.alloc_fragment((32, 64), "float32")
        T.copy(X, x)
        for i, j in T.Parallel(10, 64):
            x[5 + i, j] = 7
        T.copy(x, Y)


# CHECK: fragment: T.Parallel: TileLang accesses other elements of x than the statement names; expected T.Parallel over all elements of x with a condition, such as if i < n
# CHECK-NEXT: --> {{.*}}verify_lowering-parts.py:[[# @LINE - 6]]
with print_verdict("fragment"):
    tw.emit(fragment, arch="sm_90a")
