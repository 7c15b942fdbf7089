"""Persistent GEMM of rows that are sorted by expert, each times the weight of its expert."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ...core.tiles import DEVICE, Tiles
from ...gemm.kernels.tile_macros import ROWS
from .expert_tiles import END, EXPERT, ROW, TILES, USED

GROUPED = Tiles(128, 256, 64, stages=4, group_m=16)
"""Tiles of grouped GEMMs. Tiles of 64 rows are slower, also for 64 rows of each expert
(benchmarks/LOG.md)."""


@dataclass(frozen=True)
class GroupedConfig:
    """Parameters of a kernel.

    Attributes:
        experts, N, K: extents of the weights.
        dtype: type of all tensors, as TileLang writes it.
        transposed: whether the weights are (E, N, K) in memory; otherwise they are (E, K, N).
        tiles: shape of a tile. ``group_m`` row tiles are computed together, column by column.
        blocks: number of persistent blocks.
    """

    experts: int
    N: int
    K: int
    dtype: str
    transposed: bool
    tiles: Tiles = GROUPED
    blocks: int = DEVICE.sm_count

    @property
    def w(self) -> Any:
        """Declaration of the weights."""
        extents = (self.N, self.K) if self.transposed else (self.K, self.N)
        return T.Tensor((self.experts, *extents), self.dtype)

    @property
    def w_tile(self) -> tuple[int, int]:
        """Shape of a tile of the weights."""
        tiles = self.tiles
        return (tiles.N, tiles.K) if self.transposed else (tiles.K, tiles.N)


def grouped_gemm(config: GroupedConfig) -> Any:
    """Build the kernel: Y (M, N) is X (M, K), each row times the weight of its expert.

    The tiles of rows come from ``expert_tiles``. Two of them may share rows of one expert. Both
    compute the same bits there, so their order does not matter. Rows after those of all experts
    become zero.
    """
    rows, limit = T.dynamic("rows"), T.dynamic("limit")
    N, K, tiles, dtype, blocks = config.N, config.K, config.tiles, config.dtype, config.blocks
    columns, group_m, transposed = ceil(N / tiles.N), tiles.group_m, config.transposed

    @T.prim_func
    def grouped_gemm(
        X: T.Tensor((rows, K), dtype),
        W: config.w,
        row_tiles: T.Tensor((limit, 3), "int32"),
        counts: T.Tensor((2,), "int32"),
        Y: T.Tensor((rows, N), dtype),
    ):
        with T.Kernel(blocks, threads=tiles.threads) as block:
            X_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            W_tile = T.alloc_shared(config.w_tile, dtype)
            Y_tile = T.alloc_shared((tiles.M, tiles.width), dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            # The extent reads memory itself: see "variables before an outer loop" in
            # docs/guides/tilelang-traps.md.
            for wave in T.serial(T.ceildiv(counts[TILES] * columns - block, blocks)):
                index = wave * blocks + block
                first = index // (group_m * columns) * group_m
                height = T.min(group_m, counts[TILES] - first)
                m = T.alloc_var("int32")
                n = T.alloc_var("int32")
                row = T.alloc_var("int32")
                end = T.alloc_var("int32")
                expert = T.alloc_var("int32")
                m = first + index % (group_m * columns) % height
                n = index % (group_m * columns) // height * tiles.N
                row = row_tiles[m, ROW]
                end = row_tiles[m, END]
                expert = row_tiles[m, EXPERT]
                T.clear(total)
                for step in T.Pipelined(T.ceildiv(K, tiles.K), num_stages=tiles.stages):
                    k = step * tiles.K
                    T.copy(X[row, k], X_tile)
                    T.copy(W[expert, n, k] if transposed else W[expert, k, n], W_tile)
                    T.gemm(X_tile, W_tile, total, transpose_B=transposed, policy=ROWS)
                if row + tiles.M <= end:
                    for left in T.unroll(0, tiles.N, tiles.width):
                        T.copy(total[:, left : left + tiles.width], Y_tile)
                        T.copy(Y_tile, Y[row, n + left])
                else:
                    # Through Y_tile, TileLang would insert a barrier of all warps in each wave.
                    for i, j in T.Parallel(tiles.M, tiles.N):
                        if row + i < end and n + j < N:
                            Y[row + i, n + j] = total[i, j]
            for i in T.serial(T.ceildiv(rows - counts[USED] - block, blocks)):
                for j in T.Parallel(N):
                    Y[counts[USED] + i * blocks + block, j] = 0

    return grouped_gemm
