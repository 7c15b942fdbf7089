"""Persistent GEMM of rows that are sorted by expert, each times the weight of its expert.

Each block first counts the row tiles of all experts, and then finds the rows of each tile that it
computes. Two tiles may share rows of one expert. Both compute the same bits there, so their order
does not matter. Invalid offsets change which rows are computed, but none outside of the result.
"""

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import tilelang.language as T

from ...core.tiles import DEVICE, Tiles
from ...gemm.kernels import tile_macros
from ...gemm.kernels.tile_macros import ROWS, TileBuffers

GROUPED = Tiles(128, 256, 64, stages=4, group_m=16)
"""Tiles of grouped GEMMs. Tiles of 64 rows are slower, also for 64 rows of each expert
(benchmarks/LOG.md)."""
GROUPED_FP8 = Tiles(128, 192, 128, stages=4, group_m=16)
"""Tiles of fp8. A thread holds two accumulators, which are added every ``SCALED`` elements of K."""
FP8_REGISTERS, PRODUCER_REGISTERS = 240, 24
"""Registers of a thread that holds two accumulators, and of one that loads."""
MOST_EXPERTS = 351
"""Largest number of experts. Shared memory has room for a number for each of them beside the
operands."""
WARP = 32
CONSUMERS = 8
"""Barrier of the warps that multiply. TileLang itself uses the first ones."""
SCALED = 128
"""Extent of a block of weights, and of the part of a row, that has one scale."""
SWIGLU = "swiglu"
"""Epilogue that multiplies up by silu(gate); the weights have the rows of gate, then those of
up."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class GroupedConfig:
    """Parameters of a kernel.

    Attributes:
        experts, N, K: extents of the weights.
        dtype: type of the operands, as TileLang writes it.
        transposed: whether the weights are (E, N, K) in memory; otherwise they are (E, K, N).
        tiles: shape of a tile. ``group_m`` row tiles of an expert are computed together, column by
            column.
        blocks: number of persistent blocks.
        scales: of fp8 operands: ``tensor``, one of x and one for each expert; ``block``, one for
            each ``SCALED`` elements of a row of x, and for each square of weights; "" for none.
        out_dtype: type of the result; "" for that of the operands.
        epilogue: ``SWIGLU``, or "" for the products. With ``SWIGLU`` a block computes the same
            columns of gate and up, in the two halves of a tile.
        biased: whether a bias of each expert is added to the products.
        weighted: whether each row of the result is multiplied by a weight of its own.
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
    epilogue: str = ""
    biased: bool = False
    weighted: bool = False

    @property
    def result(self) -> str:
        """Type of the result and of the bias."""
        return self.out_dtype or self.dtype

    @property
    def gated(self) -> bool:
        """True if the products are gate and up."""
        return self.epilogue == SWIGLU

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.N // 2 if self.gated else self.N

    @property
    def tile_columns(self) -> int:
        """Columns of the result in a tile."""
        return self.tiles.N // 2 if self.gated else self.tiles.N

    @property
    def scaled(self) -> bool:
        """True if the operands have scales."""
        return self.scales != ""

    @property
    def scaled_columns(self) -> int:
        """Columns of a run in a tile that has one scale of blocks. Tiles and runs begin at
        multiples of this number, so that no run crosses a block of ``SCALED`` columns."""
        return gcd(self.tile_columns, SCALED)

    @property
    def scales_of_columns(self) -> int:
        """Largest number of blocks of ``SCALED`` columns that a tile of the result overlaps."""
        return ceil((self.tile_columns + SCALED - self.scaled_columns) / SCALED)

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

    @property
    def bias(self) -> Any:
        """Declaration of the bias, (E, N); None without."""
        if not self.biased:
            return None
        return T.Tensor((self.experts, self.N), self.result)

    def row_weights(self, rows: Any) -> Any:
        """Return the declaration of the weights of rows, (rows,); None without."""
        return T.Tensor((rows,), "float32") if self.weighted else None


@T.macro
def load_weights(config, W, expert, n, k, W_tile):
    """Load the tile of an expert's weights for the columns from ``n`` of the result."""
    if config.gated and config.transposed:
        T.copy(W[expert, n, k], W_tile[: config.tile_columns, :])
        T.copy(W[expert, config.columns + n, k], W_tile[config.tile_columns :, :])
    elif config.gated:
        T.copy(W[expert, k, n], W_tile[:, : config.tile_columns])
        T.copy(W[expert, k, config.columns + n], W_tile[:, config.tile_columns :])
    else:
        T.copy(W[expert, n, k] if config.transposed else W[expert, k, n], W_tile)


@T.macro
def accumulate(config, buffers, scales, row, n, expert, step):
    """Add the products of one step of K to ``buffers.total``, in fp32."""
    if config.scales == "block":
        accumulate_blocks(config, buffers, scales, row, n, expert, step)
    else:
        tile_macros.accumulate(config, buffers)


@T.macro
def accumulate_blocks(config, buffers, scales, row, n, expert, step):
    """Add the products of one step of K, times the scales of this step.

    Scales are loaded before the tensor cores start and used after they finish, which hides the
    latency of the loads.
    """
    scale_x, scale_w = scales
    total, width, count = buffers.total, config.scaled_columns, config.scales_of_columns
    halves, parts = (2 if config.gated else 1), config.tiles.N // width
    product = T.alloc_fragment(total.shape, "float32")
    of_rows = T.alloc_fragment((total.shape[0],), "float32")
    loaded = T.alloc_local((halves * count,), "float32")
    of_columns = T.alloc_local((parts,), "float32")
    for i in T.Parallel(total.shape[0]):
        of_rows[i] = scale_x[row + i, step]
    for half, number in T.grid(halves, count):
        # The last tile may extend past the last block of weights.
        block = (n + half * config.columns) // SCALED + number
        loaded[half * count + number] = scale_w[expert, T.min(block, scale_w.shape[1] - 1), step]
    T.gemm(buffers.A, buffers.B, product, transpose_B=True, policy=ROWS, clear_accum=True)
    for part in T.unroll(parts):
        first = part * width // config.tile_columns * count
        number = (n % SCALED + part * width % config.tile_columns) // SCALED
        of_columns[part] = select(loaded, first, count, number)
    for i, j in T.Parallel(*total.shape):
        total[i, j] += product[i, j] * (of_rows[i] * select(of_columns, 0, parts, j // width))


def select(values: Any, first: Any, count: int, index: Any) -> Any:
    """Return ``values[first + index]``, for ``index`` in [0, count), as a chain of selects.

    TileLang accepts no variable index into thread-local memory in a parallel loop, and memory with
    variable indices would not be in registers.
    """
    value = values[first]
    for number in range(1, count):
        value = T.if_then_else(index < number, value, values[first + number])
    return value


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
def find_tile(offsets, rows, tiles, columns, before, index):
    """Return the first row of a tile, the end of the rows of its expert, the expert and the column
    of tiles.

    The tiles of an expert are computed together, ``tiles.group_m`` row tiles at a time, column by
    column. The last row tile of an expert with at least ``tiles.M`` rows ends where these rows end,
    so that it has no row of another expert. It shares rows with the tile before it.

    Args:
        columns: number of tiles in a row of the result.
        before: see ``count_tiles``.
        index: number of the tile, less than that of all experts.
    """
    experts, group_m = offsets.shape[0], tiles.group_m
    # Variables are opaque to TileLang's analyzer, which needs seconds for the expressions.
    expert = T.alloc_var("int32")
    inner = T.alloc_var("int32")
    height = T.alloc_var("int32")
    column = T.alloc_var("int32")
    begin = T.alloc_var("int32")
    end = T.alloc_var("int32")
    row = T.alloc_var("int32")
    steps = int(experts).bit_length()
    expert = 0
    for step in T.unroll(steps):
        half = 1 << (steps - 1 - step)
        # The element after the last expert is the number of all tiles.
        is_later = before[T.min(expert + half, experts)] <= index // columns
        expert = expert + T.if_then_else(is_later, half, 0)
    inner = index - before[expert] * columns
    row = inner // (group_m * columns) * group_m
    height = T.min(group_m, before[T.min(expert + 1, experts)] - before[expert] - row)
    inner = inner % (group_m * columns)
    column = inner // height
    row = row + inner % height
    begin = end_of(offsets, expert - 1, rows)
    end = end_of(offsets, expert, rows)
    row = T.max(T.min(begin + row * tiles.M, end - tiles.M), begin)
    return row, end, expert, column


@T.macro
def halves_of(config, total):
    """Return copies of gate and up. TileLang accepts one index of a fragment in a loop; the copies
    use no registers beside those of ``total``."""
    width = config.tile_columns
    gate = T.alloc_fragment((config.tiles.M, width), "float32")
    up = T.alloc_fragment((config.tiles.M, width), "float32")
    T.copy(total[:, :width], gate)
    T.copy(total[:, width:], up)
    return gate, up


@T.macro
def bias_of(config, bias, n, expert):
    """Return the bias of the columns of a tile."""
    row = T.alloc_fragment((config.tiles.N,), config.result)
    if config.gated:
        T.copy(bias[expert, n], row[: config.tile_columns])
        T.copy(bias[expert, config.columns + n], row[config.tile_columns :])
    else:
        T.copy(bias[expert, n], row)
    return row


@T.macro
def begin(config, total, bias, n, expert):
    """Set a tile to its bias, or to zero.

    A bias that is added after the products would need registers beside those of the tile.
    """
    if config.biased and config.scales != "tensor":
        row = bias_of(config, bias, n, expert)
        for i, j in T.Parallel(*total.shape):
            total[i, j] = row[j]
    else:
        T.clear(total)


@T.macro
def apply_epilogue(config, total, bias, row_weights, row, n, expert):
    """Replace gate by silu(gate) * up, and multiply rows by their weights, in fp32."""
    rows, width = config.tiles.M, config.tile_columns
    if config.biased and config.scales == "tensor":
        added = bias_of(config, bias, n, expert)
        for i, j in T.Parallel(*total.shape):
            total[i, j] += added[j]
    if config.gated:
        gate, up = halves_of(config, total)
        for i, j in T.Parallel(rows, width):
            total[i, j] = gate[i, j] / (1.0 + T.exp2(-LOG2_E * gate[i, j])) * up[i, j]
    if config.weighted:
        for i, j in T.Parallel(rows, width):
            total[i, j] *= row_weights[row + i]


@T.macro
def store_by_threads(total, columns, Y, row, end, column):
    """Store the rows of a tile before ``end``, two columns at once: Y has an even number.

    Args:
        columns: columns of the result in the tile, the first ones of ``total``.
    """
    rows = total.shape[0]
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
    rows, columns = buffers.total.shape[0], config.tile_columns
    if config.scaled:
        T.sync_threads(CONSUMERS, config.tiles.threads)
        store_by_threads(buffers.total, columns, Y, row, end, column)
    elif row + rows <= end:
        if config.gated:
            T.copy(buffers.total[:, :columns], buffers.C)
            T.copy(buffers.C, Y[row, column * columns])
        else:
            tile_macros.store(buffers, (Y, (row,), column * columns))
    else:
        store_by_threads(buffers.total, columns, Y, row, end, column)


@T.macro
def clear_rest(offsets, rows, block, blocks, Y):
    """Clear the rows after those of all experts."""
    used = end_of(offsets, offsets.shape[0] - 1, rows)
    for i in T.serial(T.ceildiv(rows - used - block, blocks)):
        for j in T.Parallel(Y.shape[1]):
            Y[used + i * blocks + block, j] = 0


def grouped_gemm(config: GroupedConfig) -> Any:
    """Build the kernel: Y (M, N) is X (M, K), each row times the weight of its expert, after the
    epilogue.

    Expert e has the rows from ``offsets[e - 1]``, or 0, to ``offsets[e]``. Rows after those of all
    experts become zero.
    """
    rows = T.dynamic("rows")
    experts, K, dtype, tiles = config.experts, config.K, config.dtype, config.tiles
    columns, blocks = ceil(config.columns / config.tile_columns), config.blocks
    out_dtype = config.result

    @T.prim_func
    def grouped_gemm(
        X: T.Tensor((rows, K), dtype),
        W: config.w,
        offsets: T.Tensor((experts,), "int32"),
        scale_x: config.scale_x(rows),
        scale_w: config.scale_w,
        bias: config.bias,
        row_weights: config.row_weights(rows),
        Y: T.Tensor((rows, config.columns), out_dtype),
    ):
        with T.Kernel(blocks, threads=tiles.threads) as block:
            X_tile = T.alloc_shared((tiles.M, tiles.K), dtype)
            W_tile = T.alloc_shared(config.w_tile, dtype)
            Y_tile = T.alloc_shared((tiles.M, tiles.width), out_dtype)
            total = T.alloc_fragment((tiles.M, tiles.N), "float32")
            if config.scaled:
                T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
                T.annotate_consumer_reg_alloc(FP8_REGISTERS)
            buffers = TileBuffers(X_tile, W_tile, Y_tile, total)
            before = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            scratch = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            count_tiles(offsets, rows, tiles.M, before, scratch)
            # The extent is an upper bound, because TileLang allows no shared memory there.
            most = (rows // tiles.M + experts) * columns
            for wave in T.serial(T.ceildiv(most - block, blocks)):
                index = wave * blocks + block
                if index < before[experts] * columns:
                    row, end, expert, column = find_tile(
                        offsets, rows, tiles, columns, before, index
                    )
                    begin(config, total, bias, column * config.tile_columns, expert)
                    for step in T.Pipelined(T.ceildiv(K, tiles.K), num_stages=tiles.stages):
                        n, k = column * config.tile_columns, step * tiles.K
                        T.copy(X[row, k], X_tile)
                        load_weights(config, W, expert, n, k, W_tile)
                        accumulate(config, buffers, (scale_x, scale_w), row, n, expert, step)
                    if config.scales == "tensor":
                        for i, j in T.Parallel(tiles.M, tiles.N):
                            total[i, j] *= scale_x[0] * scale_w[expert]
                    n = column * config.tile_columns
                    apply_epilogue(config, total, bias, row_weights, row, n, expert)
                    store(config, buffers, Y, row, end, column)
            clear_rest(offsets, rows, block, blocks, Y)

    return grouped_gemm
