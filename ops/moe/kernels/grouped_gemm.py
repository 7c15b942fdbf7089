"""Persistent GEMM of rows that are sorted by expert, each times the weight of its expert.

Each block first counts the row tiles of all experts, and then finds the rows of each tile that it
computes. Two tiles may share rows of one expert. Both compute the same bits there, so their order
does not matter. Invalid offsets change which rows are computed, but none outside of the result.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ...core.tiles import DEVICE, Tiles
from ...gemm.kernels import tile_macros
from ...gemm.kernels.tile_macros import ROWS, TileBuffers

GROUPED = Tiles(128, 256, 64, stages=4, group_m=16)
"""Tiles of grouped GEMMs. Tiles of 64 rows are slower, also for 64 rows of each expert
(benchmarks/LOG.md)."""
GROUPED_FP8 = Tiles(128, 128, 128, stages=4, group_m=16)
"""Tiles of fp8. A thread holds two accumulators, which are added every ``SCALED`` elements of K."""
MOST_EXPERTS = 351
"""Largest number of experts. Shared memory has room for a number for each of them beside the
operands."""
WARP = 32
CONSUMERS = 8
"""Barrier of the warps that multiply. TileLang itself uses the first ones."""
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


def numbers_of(experts: int) -> int:
    """Return the number of elements that ``count_tiles`` needs: more than experts, and a multiple
    of a warp, because only whole warps can meet at a barrier."""
    return ceil((experts + 1) / WARP) * WARP


@T.macro
def end_of(offsets, expert, rows):
    """Return the end of the rows of an expert, at most ``rows``; 0 for the expert before the
    first."""
    return T.if_then_else(expert < 0, 0, T.min(T.max(offsets[T.max(expert, 0)], 0), rows))


@T.macro
def add_shifted(old, new, shift):
    """Compute ``new[e] = old[e] + old[e - shift]``, where an element before the first one is 0."""
    for e in T.Parallel(*old.shape):
        new[e] = old[e] + T.if_then_else(e >= shift, old[T.max(e - shift, 0)], 0)


@T.macro
def count_tiles(offsets, rows, tile_rows, before, scratch):
    """Set ``before[e]`` to the number of row tiles of all experts before ``e``.

    Invalid offsets change the numbers, but none is negative.

    Args:
        before, scratch: ``numbers_of(experts)`` elements in static shared memory. TileLang does not
            compare dynamic memory that threads read with what the TMA writes, and would insert a
            barrier of all warps in each wave.
    """
    last = offsets.shape[0] - 1
    for e in T.Parallel(*before.shape):
        end = end_of(offsets, T.min(e - 1, last), rows)
        begin = end_of(offsets, T.min(e - 2, last), rows)
        before[e] = T.max(T.ceildiv(end - begin, tile_rows), 0)
    for step in T.unroll(ceil(int(before.shape[0]).bit_length() / 2)):
        add_shifted(before, scratch, 1 << 2 * step)
        add_shifted(scratch, before, 2 << 2 * step)


@T.macro
def find_tile(offsets, rows, tile_rows, before, tile):
    """Return the first row of a row tile, the end of the rows of its expert, and the expert.

    The last tile of an expert with at least ``tile_rows`` rows ends where these rows end, so that
    it has no row of another expert. It shares rows with the tile before it.

    Args:
        before: see ``count_tiles``.
        tile: number of the tile, less than that of all experts.
    """
    experts = offsets.shape[0]
    # Variables are opaque to TileLang's analyzer, which needs seconds for the expressions.
    expert = T.alloc_var("int32")
    begin = T.alloc_var("int32")
    end = T.alloc_var("int32")
    row = T.alloc_var("int32")
    steps = int(experts).bit_length()
    expert = 0
    for step in T.unroll(steps):
        half = 1 << (steps - 1 - step)
        # The element after the last expert is the number of all tiles.
        is_later = before[T.min(expert + half, experts)] <= tile
        expert = expert + T.if_then_else(is_later, half, 0)
    begin = end_of(offsets, expert - 1, rows)
    end = end_of(offsets, expert, rows)
    row = begin + (tile - before[expert]) * tile_rows
    row = T.max(T.min(row, end - tile_rows), begin)
    return row, end, expert


@T.macro
def store_by_threads(total, Y, row, end, column):
    """Store the rows of a tile before ``end``, two columns at once: Y has an even number."""
    rows, columns = total.shape
    for i, j, lane in T.Parallel(rows, columns // 2, 2):
        if row + i < end and column * columns + 2 * j < Y.shape[1]:
            Y[row + i, column * columns + 2 * j + lane] = total[i, 2 * j + lane]


@T.macro
def store(config, buffers, Y, row, end, column):
    """Store a tile of the result: by TMA if all of its rows are of one expert.

    Other tiles do not pass through shared memory, because TileLang would insert a barrier of all
    warps in each wave. It would do so for any tile of the result whose elements have another size
    than the operands: it compares their places in shared memory by the number of the element.
    """
    rows, columns = buffers.total.shape
    if config.scaled:
        T.sync_threads(CONSUMERS, config.tiles.threads)
        store_by_threads(buffers.total, Y, row, end, column)
    elif row + rows <= end:
        tile_macros.store(buffers, (Y, (row,), column * columns))
    else:
        store_by_threads(buffers.total, Y, row, end, column)


def grouped_gemm(config: GroupedConfig) -> Any:
    """Build the kernel: Y (M, N) is X (M, K), each row times the weight of its expert.

    Expert e has the rows from ``offsets[e - 1]``, or 0, to ``offsets[e]``. Rows after those of all
    experts become zero.
    """
    rows = T.dynamic("rows")
    N, K, tiles, dtype, blocks = config.N, config.K, config.tiles, config.dtype, config.blocks
    experts, transposed = config.experts, config.transposed
    columns, group_m = ceil(N / tiles.N), tiles.group_m
    out_dtype = config.out_dtype or dtype

    @T.prim_func
    def grouped_gemm(
        X: T.Tensor((rows, K), dtype),
        W: config.w,
        offsets: T.Tensor((experts,), "int32"),
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
            before = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            scratch = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            count_tiles(offsets, rows, tiles.M, before, scratch)
            # The extent is an upper bound, because TileLang allows no shared memory there.
            most = (rows // tiles.M + experts) * columns
            for wave in T.serial(T.ceildiv(most - block, blocks)):
                index = wave * blocks + block
                if index < before[experts] * columns:
                    first = index // (group_m * columns) * group_m
                    height = T.min(group_m, before[experts] - first)
                    # The first column is a product, so that TileLang sees that it is even.
                    m = T.alloc_var("int32")
                    column = T.alloc_var("int32")
                    m = first + index % (group_m * columns) % height
                    column = index % (group_m * columns) // height
                    row, end, expert = find_tile(offsets, rows, tiles.M, before, m)
                    T.clear(total)
                    for step in T.Pipelined(T.ceildiv(K, tiles.K), num_stages=tiles.stages):
                        n, k = column * tiles.N, step * tiles.K
                        T.copy(X[row, k], X_tile)
                        T.copy(W[expert, n, k] if transposed else W[expert, k, n], W_tile)
                        accumulate(config, buffers, (scale_x, scale_w), row, n, expert, step)
                    if config.scales == "tensor":
                        for i, j in T.Parallel(tiles.M, tiles.N):
                            total[i, j] *= scale_x[0] * scale_w[expert]
                    store(config, buffers, Y, row, end, column)
            used = end_of(offsets, experts - 1, rows)
            for i in T.serial(T.ceildiv(rows - used - block, blocks)):
                for j in T.Parallel(N):
                    Y[used + i * blocks + block, j] = 0

    return grouped_gemm
