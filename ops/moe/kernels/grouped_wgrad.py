"""Persistent GEMM of the gradient of expert weights: its inner dimension is the expert's rows."""

from math import ceil
from typing import Any

import tilelang.language as T

from ...gemm.kernels.tile_macros import ROWS
from .grouped_gemm import GroupedConfig


@T.macro
def clear_rows(tile, row, end):
    """Set the rows of a tile from ``end`` to zero; other experts own them, and they may be NaN."""
    for i, j in T.Parallel(*tile.shape):
        tile[i, j] = T.if_then_else(row + i < end, tile[i, j], 0)


def grouped_wgrad(config: GroupedConfig) -> Any:
    """Build the kernel: dW (E, N, K) is the sum over the rows of each expert of the outer products
    of dY (M, N) and X (M, K); zero for an expert without rows.

    ``config.transposed`` is of dW. If it is False, the caller exchanges dY and X, N and K.
    """
    rows = T.dynamic("rows")
    experts, N, K, tiles = config.experts, config.N, config.K, config.tiles
    dtype, blocks = config.dtype, config.blocks
    high, wide = ceil(N / tiles.M), ceil(K / tiles.N)
    width = tiles.width

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
                    for step in T.Pipelined(
                        T.ceildiv(end - begin, tiles.K), num_stages=tiles.stages
                    ):
                        row = begin + step * tiles.K
                        T.copy(dY[row, n], dY_tile)
                        T.copy(X[row, k], X_tile)
                        # One product after both cases would need a barrier in each step.
                        if row + tiles.K <= end:
                            T.gemm(dY_tile, X_tile, total, transpose_A=True, policy=ROWS)
                        else:
                            clear_rows(dY_tile, row, end)
                            clear_rows(X_tile, row, end)
                            T.gemm(dY_tile, X_tile, total, transpose_A=True, policy=ROWS)
                    for left in T.unroll(0, tiles.N, width):
                        T.copy(total[:, left : left + width], dW_tile)
                        T.copy(dW_tile, dW[expert, n, k + left])

    return grouped_wgrad
