"""Persistent GEMM of rows that are sorted by expert, each times the weight of its expert."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ...core.tiles import DEVICE, Tiles
from ...gemm.kernels import tile_macros
from ...gemm.kernels.tile_macros import ROWS, TileBuffers
from .expert_tiles import END, EXPERT, ROW, TILES, USED

GROUPED = Tiles(128, 256, 64, stages=4, group_m=16)
"""Tiles of grouped GEMMs. Tiles of 64 rows are slower, also for 64 rows of each expert
(benchmarks/LOG.md)."""
GROUPED_FP8 = Tiles(128, 128, 128, stages=4, group_m=16)
"""Tiles of fp8. A thread holds two accumulators, which are added every ``SCALED`` elements of K."""
SCALED = 128
"""Extent of a block of weights, and of the part of a row, that has one scale."""


@dataclass(frozen=True)
class GroupedConfig:
    """Parameters of a kernel.

    Attributes:
        experts, N, K: extents of the weights.
        dtype: type of the operands, as TileLang writes it.
        transposed: whether the weights are (E, N, K) in memory; otherwise they are (E, K, N).
        tiles: shape of a tile. ``group_m`` row tiles are computed together, column by column.
        blocks: number of persistent blocks.
        scales: of fp8 operands: ``tensor``, one of x and one for each expert; ``block``, one for
            each ``SCALED`` elements of a row of x, and for each square of weights; "" for none.
        out_dtype: type of the result; "" for that of the operands.
    """

    experts: int
    N: int
    K: int
    dtype: str
    transposed: bool
    tiles: Tiles = GROUPED
    blocks: int = DEVICE.sm_count
    scales: str = ""
    out_dtype: str = ""

    @property
    def scaled(self) -> bool:
        """True if the operands have scales."""
        return self.scales != ""

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

    def scale_x(self, rows: Any) -> Any:
        """Return the declaration of the scales of x, (1,) or (rows, K / 128); None without."""
        if not self.scales:
            return None
        extents = (1,) if self.scales == "tensor" else (rows, ceil(self.K / SCALED))
        return T.Tensor(extents, "float32")

    @property
    def scale_w(self) -> Any:
        """Declaration of the scales of w, (E,) or (E, N / 128, K / 128); None without."""
        if not self.scales:
            return None
        blocks = (ceil(self.N / SCALED), ceil(self.K / SCALED))
        return T.Tensor((self.experts, *(blocks if self.scales == "block" else ())), "float32")


@T.macro
def accumulate(config, buffers, scales, row, n, expert, step):
    """Add the products of one step of K to ``buffers.total``, in fp32.

    CUDA cores multiply the products of a step by its scales, and add them.
    """
    scale_x, scale_w = scales
    if config.scales == "block":
        total = buffers.total
        product = T.alloc_fragment(total.shape, "float32")
        factor = T.alloc_fragment((total.shape[0],), "float32")
        for i in T.Parallel(total.shape[0]):
            factor[i] = scale_x[row + i, step] * scale_w[expert, n // SCALED, step]
        T.gemm(buffers.A, buffers.B, product, transpose_B=True, policy=ROWS, clear_accum=True)
        for i, j in T.Parallel(*total.shape):
            total[i, j] += product[i, j] * factor[i]
    else:
        tile_macros.accumulate(config, buffers)


@T.macro
def store(buffers, Y, row, end, n):
    """Store a tile of the result: by TMA if all of its rows are of one expert."""
    total = buffers.total
    rows, columns = total.shape
    if row + rows <= end:
        tile_macros.store(buffers, (Y, (row,), n))
    else:
        # Through shared memory, TileLang would insert a barrier of all warps in each wave.
        for i, j in T.Parallel(rows, columns):
            if row + i < end and n + j < Y.shape[1]:
                Y[row + i, n + j] = total[i, j]


def grouped_gemm(config: GroupedConfig) -> Any:
    """Build the kernel: Y (M, N) is X (M, K), each row times the weight of its expert.

    The tiles of rows come from ``expert_tiles``. Two of them may share rows of one expert. Both
    compute the same bits there, so their order does not matter. Rows after those of all experts
    become zero.
    """
    rows, limit = T.dynamic("rows"), T.dynamic("limit")
    N, K, tiles, dtype, blocks = config.N, config.K, config.tiles, config.dtype, config.blocks
    columns, group_m, transposed = ceil(N / tiles.N), tiles.group_m, config.transposed
    out_dtype = config.out_dtype or dtype

    @T.prim_func
    def grouped_gemm(
        X: T.Tensor((rows, K), dtype),
        W: config.w,
        row_tiles: T.Tensor((limit, 3), "int32"),
        counts: T.Tensor((2,), "int32"),
        scale_x: config.scale_x(rows),
        scale_w: config.scale_w,
        Y: T.Tensor((rows, N), out_dtype),
    ):
        with T.Kernel(blocks, threads=tiles.threads) as block:
            X_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            W_tile = T.alloc_shared(config.w_tile, dtype)
            Y_tile = T.alloc_shared((tiles.M, tiles.width), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            buffers = TileBuffers(X_tile, W_tile, Y_tile, total)
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
                    accumulate(config, buffers, (scale_x, scale_w), row, n, expert, step)
                if config.scales == "tensor":
                    for i, j in T.Parallel(tiles.M, tiles.N):
                        total[i, j] *= scale_x[0] * scale_w[expert]
                store(buffers, Y, row, end, n)
            for i in T.serial(T.ceildiv(rows - counts[USED] - block, blocks)):
                for j in T.Parallel(N):
                    Y[counts[USED] + i * blocks + block, j] = 0

    return grouped_gemm
