"""Persistent GEMM of the gradient of expert weights: its inner dimension is the expert's rows."""

from math import ceil
from typing import Any

import tilelang.language as T

from ...gemm.kernels.tile_macros import ROWS
from .grouped_gemm import GroupedConfig

TAIL = 16
"""Rows of a step of ``multiply_tail``: as many as one instruction multiplies."""


@T.macro
def multiply_tail(dY, X, row, end, n, k, dY_tile, X_tile, total):
    """Add the products of fewer rows than a tile has.

    Other experts own the rows from ``end``. They may be NaN, so zeros replace them in both
    operands.
    """
    for step in T.serial(T.ceildiv(end - row, TAIL)):
        for i, j in T.Parallel(*dY_tile.shape):
            inside = row + step * TAIL + i < end and n + j < dY.shape[1]
            dY_tile[i, j] = T.if_then_else(inside, dY[row + step * TAIL + i, n + j], 0)
        for i, j in T.Parallel(*X_tile.shape):
            inside = row + step * TAIL + i < end and k + j < X.shape[1]
            X_tile[i, j] = T.if_then_else(inside, X[row + step * TAIL + i, k + j], 0)
        T.gemm(dY_tile, X_tile, total, transpose_A=True, policy=ROWS)


def grouped_wgrad(config: GroupedConfig) -> Any:
    """Build the kernel: dW (E, N, K) is the sum over the rows of each expert of the outer products
    of dY (M, N) and X (M, K); zero for an expert without rows.

    ``config.transposed`` is of dW. If it is False, the caller exchanges dY and X, N and K.
    """
    rows = T.dynamic("rows")
    experts, N, K, tiles = config.experts, config.N, config.K, config.tiles
    dtype, blocks = config.dtype, config.blocks
    high, wide = ceil(N / tiles.M), ceil(K / tiles.N)
    width = tiles.width // 2

    @T.prim_func
    def grouped_wgrad(
        dY: T.Tensor((rows, N), dtype),
        X: T.Tensor((rows, K), dtype),
        offsets: T.Tensor((experts,), "int32"),
        dW: T.Tensor((experts, N, K), dtype),
    ):
        with T.Kernel(blocks, threads=tiles.threads) as block:
            dY_tile = T.alloc_shared((tiles.K, tiles.M), dtype)
            X_tile = T.alloc_shared((tiles.K, tiles.N), dtype)
            dY_tail = T.alloc_shared((TAIL, tiles.M), dtype)
            X_tail = T.alloc_shared((TAIL, tiles.N), dtype)
            dW_tile = T.alloc_shared((tiles.M, width), dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            for wave in T.serial(ceil(experts * high * wide / blocks)):
                index = wave * blocks + block
                if index < experts * high * wide:
                    expert = index // (high * wide)
                    n = index % (high * wide) % high * tiles.M
                    k = index % (high * wide) // high * tiles.N
                    begin = T.alloc_var("int32")
                    end = T.alloc_var("int32")
                    begin = T.if_then_else(expert > 0, offsets[T.max(expert - 1, 0)], 0)
                    begin = T.min(T.max(begin, 0), rows)
                    end = T.max(T.min(offsets[expert], rows), begin)
                    T.clear(total)
                    for step in T.Pipelined((end - begin) // tiles.K, num_stages=tiles.stages):
                        T.copy(dY[begin + step * tiles.K, n], dY_tile)
                        T.copy(X[begin + step * tiles.K, k], X_tile)
                        T.gemm(dY_tile, X_tile, total, transpose_A=True, policy=ROWS)
                    row = begin + (end - begin) // tiles.K * tiles.K
                    multiply_tail(dY, X, row, end, n, k, dY_tail, X_tail, total)
                    for left in T.unroll(0, tiles.N, width):
                        T.copy(total[:, left : left + width], dW_tile)
                        T.copy(dW_tile, dW[expert, n, k + left])

    return grouped_wgrad
