"""Persistent GEMM of rows that are sorted by expert, each times the weight of its expert.

Each block first counts the row tiles of all experts, and then finds the rows of each tile that it
computes. Invalid offsets change which rows are computed, but none outside of the result.

The columns of a tile have two halves: gate and up, or left and right. With scales each half has an
accumulator of its own, and the scale of one block of weights.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from ...core.tiles import DEVICE, Tiles
from ...gemm.kernels.tile_macros import ROWS

GROUPED = Tiles(128, 256, 64, stages=4, group_m=16)
"""Tiles of grouped GEMMs."""
GROUPED_FP8 = Tiles(128, 256, 128, stages=4, group_m=16)
"""Tiles of fp8. The products of each ``SCALED`` elements of K are computed one half of the columns
at a time, and added to the sums of that half."""
GROUPED_FEW_ROWS = Tiles(64, 256, 64, stages=5, threads=128, group_m=16)
GROUPED_FP8_FEW_ROWS = Tiles(64, 256, 128, stages=4, threads=128, group_m=16)
"""Tiles if experts have at most as many rows as a tile, on average. Reading the weights then takes
the time, and higher tiles would multiply twice as many rows."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
"""Registers of a thread that multiplies, and of one that loads. The first holds the sums of a tile,
and with scales the products of a half."""
MOST_EXPERTS = 351
"""Largest number of experts. Shared memory has room for a number for each of them beside the
operands."""
WARP = 32
CONSUMERS = 8
"""Barrier of the warps that multiply. TileLang itself uses the first ones."""
VECTOR = 8
"""Elements of the result that a thread stores at once."""
LOADED_ROWS = 32
"""Rows that one instruction loads. Those after the end of an expert are zeros, which tensor cores
multiply with less energy: the limit of the power decides about the speed of large problems."""
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
        clear_rest: whether rows after those of all experts become zero.
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
    clear_rest: bool = True

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
    def half_columns(self) -> int:
        """Columns of half a tile of the products."""
        return self.tiles.N // 2

    def column_of(self, n: Any, half: int) -> Any:
        """Return the first column of a half of the products of a tile.

        Args:
            n: first column of the tile of the result.
            half: 0 for gate or left, 1 for up or right.
        """
        return n + half * (self.columns if self.gated else self.half_columns)

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


class Place(NamedTuple):
    """Place of a tile in the result.

    Attributes:
        row, n: its first row and column.
        end: end of the rows of its expert.
        expert: number of the expert.
    """

    row: Any
    end: Any
    n: Any
    expert: Any


def tiles_of(rows: int, experts: int, scales: str) -> Tiles:
    """Return the tiles for a number of rows.

    Args:
        scales: see ``GroupedConfig``.
    """
    many, few = (GROUPED_FP8, GROUPED_FP8_FEW_ROWS) if scales else (GROUPED, GROUPED_FEW_ROWS)
    return few if rows <= few.M * experts else many


def load_rows(config, X, place, k, X_tile) -> None:
    """Load the rows of a tile that its expert has. The others become zero."""
    for first in range(0, config.tiles.M, LOADED_ROWS):
        load_some_rows(X, place.row + first, place.end, k, X_tile[first : first + LOADED_ROWS, :])


@T.macro
def load_some_rows(X, row, end, k, rows):
    """Load ``LOADED_ROWS`` rows if the first one is before ``end``, otherwise zeros."""
    T.copy(X[T.if_then_else(row < end, row, X.shape[0]), k], rows)


@T.macro
def load_weights(config, W, expert, n, k, W_tile):
    """Load the tile of an expert's weights for the columns from ``n`` of the result."""
    if config.gated:
        load_half(config, W, expert, config.column_of(n, 0), k, W_tile, 0)
        load_half(config, W, expert, config.column_of(n, 1), k, W_tile, 1)
    else:
        T.copy(W[expert, n, k] if config.transposed else W[expert, k, n], W_tile)


@T.macro
def load_half(config, W, expert, n, k, W_tile, half):
    """Load half a tile of an expert's weights, for the products from column ``n``."""
    first = half * config.half_columns
    if config.transposed:
        T.copy(W[expert, n, k], W_tile[first : first + config.half_columns, :])
    else:
        T.copy(W[expert, k, n], W_tile[:, first : first + config.half_columns])


def alloc_sums(config: GroupedConfig) -> list[Any]:
    """Allocate the sums of a tile in registers: of both halves apart if there are scales."""
    columns = config.half_columns if config.scaled else config.tiles.N
    return [
        T.alloc_fragment((config.tiles.M, columns), "float32")
        for _ in range(config.tiles.N // columns)
    ]


@T.macro
def load_scales(config, scales, place, step, of_rows, of_halves):
    """Load the scales of the rows and of both halves of the columns for a step of K."""
    scale_x, scale_w = scales
    for i in T.Parallel(config.tiles.M):
        of_rows[i] = scale_x[place.row + i, step]
    # The last tile may extend past the last block of weights.
    last = scale_w.shape[1] - 1
    for half in T.unroll(2):
        block = config.column_of(place.n, half) // SCALED
        of_halves[half] = scale_w[place.expert, T.min(block, last), step]


@T.macro
def multiply(config, operands, scales, place, tiles, sums):
    """Add the products of a tile to ``sums`` in fp32.

    Args:
        operands, tiles: X and W, and their tiles in shared memory.
    """
    (X, W), (X_tile, W_tile) = operands, tiles
    total, steps = sums[0], ceil(config.K / config.tiles.K)
    of_rows = T.alloc_fragment((config.tiles.M,), "float32")
    of_halves = T.alloc_local((2,), "float32")
    rows_ahead = T.alloc_fragment((config.tiles.M,), "float32")
    halves_ahead = T.alloc_local((2,), "float32")
    product = T.alloc_fragment((config.tiles.M, config.half_columns), "float32")
    if config.scales == "block":
        load_scales(config, scales, place, 0, rows_ahead, halves_ahead)
    for step in T.Pipelined(steps, num_stages=config.tiles.stages):
        load_rows(config, X, place, step * config.tiles.K, X_tile)
        load_weights(config, W, place.expert, place.n, step * config.tiles.K, W_tile)
        if config.scales == "block":
            # Tensor cores would wait for the scales, so these are loaded a step earlier.
            T.copy(rows_ahead, of_rows)
            for half in T.unroll(2):
                of_halves[half] = halves_ahead[half]
            load_scales(config, scales, place, T.min(step + 1, steps - 1), rows_ahead, halves_ahead)
        if config.scaled:
            add_half(config, X_tile, W_tile, product, of_rows, of_halves, sums, 0)
            add_half(config, X_tile, W_tile, product, of_rows, of_halves, sums, 1)
        else:
            T.gemm(X_tile, W_tile, total, transpose_B=config.transposed, policy=ROWS)


@T.macro
def add_half(config, X_tile, W_tile, product, of_rows, of_halves, sums, half):
    """Add the products of half of the columns, times their scales.

    Tensor cores of sm_90 accumulate fp8 products in fewer bits than fp32. So CUDA cores add the
    products of each step, as CUTLASS does without fast accumulation.
    """
    total, first = sums[half], half * config.half_columns
    T.gemm(
        X_tile, W_tile[first : first + config.half_columns, :], product,
        transpose_B=True, policy=ROWS, clear_accum=True,
    )  # fmt: skip
    for i, j in T.Parallel(*total.shape):
        if config.scales == "block":
            total[i, j] += product[i, j] * (of_rows[i] * of_halves[half])
        else:
            total[i, j] += product[i, j]


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
    column.

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
    row = begin + row * tiles.M
    return row, end, expert, column


@T.macro
def halves_of(config, total):
    """Return copies of both halves of a tile of products. TileLang accepts one index of a fragment
    in a loop; the copies use no registers beside those of ``total``."""
    columns = config.half_columns
    left = T.alloc_fragment((config.tiles.M, columns), "float32")
    right = T.alloc_fragment((config.tiles.M, columns), "float32")
    T.copy(total[:, :columns], left)
    T.copy(total[:, columns:], right)
    return left, right


@T.macro
def bias_of(config, bias, n, expert):
    """Return the bias of the columns of a tile."""
    row = T.alloc_fragment((config.tiles.N,), config.result)
    if config.gated:
        T.copy(bias[expert, n], row[: config.half_columns])
        T.copy(bias[expert, config.column_of(n, 1)], row[config.half_columns :])
    else:
        T.copy(bias[expert, n], row)
    return row


@T.macro
def begin(config, sums, bias, n, expert):
    """Set the sums of a tile to its bias, or to zero.

    A bias that is added after the products would need registers beside those of the tile.
    """
    total = sums[0]
    if config.biased and not config.scaled:
        row = bias_of(config, bias, n, expert)
        for i, j in T.Parallel(*total.shape):
            total[i, j] = row[j]
    else:
        T.clear(total)
    if config.scaled:
        T.clear(sums[1])


@T.macro
def scale_and_bias(config, half, total, scales, bias, n, expert):
    """Multiply half of the products by the scales of whole tensors, and add its bias."""
    if config.scales == "tensor":
        scale_x, scale_w = scales
        for i, j in T.Parallel(*total.shape):
            total[i, j] *= scale_x[0] * scale_w[expert]
    if config.biased:
        row = T.alloc_fragment((config.half_columns,), config.result)
        T.copy(bias[expert, config.column_of(n, half)], row)
        for i, j in T.Parallel(*total.shape):
            total[i, j] += row[j]


@T.macro
def multiply_by_silu(gate, up, total):
    """Set the first columns of ``total`` to silu(gate) * up, in fp32."""
    for i, j in T.Parallel(*gate.shape):
        total[i, j] = gate[i, j] / (1.0 + T.exp2(-LOG2_E * gate[i, j])) * up[i, j]


@T.macro
def multiply_rows(total, row_weights, row):
    """Multiply the rows of a tile from ``row`` by their weights."""
    for i, j in T.Parallel(*total.shape):
        total[i, j] *= row_weights[row + i]


def apply_epilogue(config, sums, scales, bias, row_weights, place) -> None:
    """Apply the epilogue to a tile of products in fp32. The result of gate and up replaces gate."""
    if config.scaled:
        for half, total in enumerate(sums):
            scale_and_bias(config, half, total, scales, bias, place.n, place.expert)
    if config.gated:
        gate, up = sums if config.scaled else halves_of(config, sums[0])
        multiply_by_silu(gate, up, sums[0])
    if config.weighted:
        for total in sums[:1] if config.gated else sums:
            multiply_rows(total, row_weights, place.row)


def store(config, sums, Y_tile, Y, row, end, n) -> None:
    """Round and store the rows of a tile of the result before ``end``, half a tile at a time."""
    width = config.half_columns
    halves = [
        x[:, first : first + width] for x in sums for first in range(0, int(x.shape[1]), width)
    ]
    for half, columns in enumerate(halves[: config.tile_columns // width]):
        store_half(config, columns, Y_tile, Y, row, end, n + half * width)


@T.macro
def store_half(config, columns, Y_tile, Y, row, end, n):
    """Store half a tile from column ``n`` of the result. It passes through shared memory, so that a
    thread stores ``VECTOR`` neighbors at once."""
    if config.biased:
        # TileLang would insert a barrier of all warps instead.
        T.sync_threads(CONSUMERS, config.tiles.threads)
    T.copy(columns, Y_tile)
    for i, j, lane in T.Parallel(config.tiles.M, config.half_columns // VECTOR, VECTOR):
        if row + i < end and n + j * VECTOR < Y.shape[1]:
            Y[row + i, n + j * VECTOR + lane] = Y_tile[i, j * VECTOR + lane]


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
    experts become zero, or are not written.
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
            # TileLang does not compare static shared memory with what the TMA writes, and would
            # insert a barrier of all warps in each wave.
            Y_tile = T.alloc_shared((tiles.M, config.half_columns), out_dtype, scope="shared")
            T.annotate_layout({Y_tile: make_swizzled_layout(Y_tile)})
            before = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            scratch = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            sums = alloc_sums(config)
            T.annotate_producer_reg_dealloc(PRODUCER_REGISTERS)
            T.annotate_consumer_reg_alloc(CONSUMER_REGISTERS)
            count_tiles(offsets, rows, tiles.M, before, scratch)
            # The extent is an upper bound, because TileLang allows no shared memory there.
            most = (rows // tiles.M + experts) * columns
            for wave in T.serial(T.ceildiv(most - block, blocks)):
                index = wave * blocks + block
                if index < before[experts] * columns:
                    row, end, expert, column = find_tile(
                        offsets, rows, tiles, columns, before, index
                    )
                    n = column * config.tile_columns
                    begin(config, sums, bias, n, expert)
                    scales, place = (scale_x, scale_w), Place(row, end, n, expert)
                    multiply(config, (X, W), scales, place, (X_tile, W_tile), sums)
                    apply_epilogue(config, sums, scales, bias, row_weights, place)
                    store(config, sums, Y_tile, Y, row, end, n)
            if config.clear_rest:
                clear_rest(offsets, rows, block, blocks, Y)

    return grouped_gemm
