# RUN: %python %s | %filecheck %s
"""TileLang keeps barriers in branches on ``W.rank_uniform``, which becomes its operand."""

import tilelang.language as T

import tileweave as tw
from tileweave import language as W


@T.prim_func
def program(
    X: T.Tensor((64, 64), "float16"),
    num: T.Tensor((1,), "int32"),
    Y: T.Tensor((64, 64), "float16"),
):
    with T.Kernel(4, threads=128) as block:
        tile = T.alloc_shared((16, 64), "float16")
        n = W.rank_uniform(num[0])
        if block < n:
            T.copy(X[block * 16, 0], tile)
            T.copy(tile, Y[block * 16, 0])


# CHECK-NOT: rank_uniform
# CHECK: int n = num[0];
# CHECK: if (((int)blockIdx.x) < n) {
# CHECK: tile +
# CHECK: __syncthreads();
# CHECK: tma_store
print(tw.emit(program, world_size=2))
