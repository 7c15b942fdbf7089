"""Gated MLPs of experts whose GEMMs overlap the exchange of tokens and results.

Two programs. The first sends the tokens and multiplies them by the weights of gate and up. The
second multiplies by the weights of down, sends the results back and adds them. On each rank::

    send     | expert 0: own tokens, those for each peer | expert 1 | ...
    multiply |    wait | gate, up of expert 0: own tokens, each peer's tokens | expert 1 | ...
    - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - -
    multiply | down of expert 0: results for each peer, own results | expert 1 | ... |
    add      |                                                       wait for results | add |

The rows that one source rank sends to one expert are a segment of a ragged tensor. A row tile is
multiplied as soon as its rows have arrived, and its results are sent tile by tile.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ....builtins import language as W
from ....passes import with_options
from ...core.tiles import DEVICE, Tiles
from ...gemm.kernels.tile_macros import TileBuffers, accumulate
from .grouped_gemm import SWIGLU, GroupedConfig, halves_of, load_weights, multiply_by_silu

GATE_UP = Tiles(128, 192, 64, stages=4)
"""Tiles of the product with gate and up; half of the columns are of gate, half of up. Larger
accumulators and the state of the loops exceed the registers."""
DOWN = Tiles(128, 256, 64, stages=4)
"""Tiles of the product with down."""
SENDERS = 16
"""Blocks that send tokens. Not measured in this kernel; alone, 16 blocks of 512 threads saturate
NVLink."""
PART = 16
"""Rows of results that are stored together. Announced numbers of results are multiples of it."""
VECTOR = 8
"""Elements that a thread loads or stores at once."""


@dataclass(frozen=True)
class ExpertMlpConfig:
    """Parameters of the programs.

    Attributes:
        tokens, choices: tokens of a rank, and experts of a token.
        per_rank: experts of a rank.
        hidden, width: columns of a token, and of gate.
        gate_up, down: tiles of the products.
        senders: blocks of the first program that send tokens.
        blocks: blocks of the first program, those that send included; in the second program the
            number of blocks that multiply, and of blocks that add.
    """

    tokens: int
    choices: int
    per_rank: int
    hidden: int
    width: int
    ranks: int
    dtype: str
    gate_up: Tiles = GATE_UP
    down: Tiles = DOWN
    senders: int = SENDERS
    blocks: int = DEVICE.sm_count

    @property
    def capacity(self) -> int:
        """Rows of a segment, in whole tiles: a token has at most one row at an expert."""
        return ceil(self.tokens / self.gate_up.M) * self.gate_up.M

    @property
    def padded_segments(self) -> int:
        """Segments of a rank, rounded up to a multiple of the threads of a warp."""
        return ceil(self.per_rank * self.ranks / 32) * 32

    @property
    def gate_up_gemm(self) -> GroupedConfig:
        """Product with the weights of gate and up."""
        return GroupedConfig(
            self.per_rank, 2 * self.width, self.hidden, self.dtype, True, self.gate_up,
            out_dtype=self.dtype, epilogue=SWIGLU,
        )  # fmt: skip

    @property
    def down_gemm(self) -> GroupedConfig:
        """Product with the weights of down."""
        return GroupedConfig(
            self.per_rank, self.hidden, self.width, self.dtype, True, self.down,
            out_dtype=self.dtype,
        )  # fmt: skip

    @property
    def padded_vectors(self) -> int:
        """Vectors of a row, rounded up to a multiple of the threads of a block, the producer's
        included."""
        threads = self.down.threads + 128
        return ceil(self.hidden / VECTOR / threads) * threads


@T.macro
def send(config, x, sent, counts, inbox, block):
    """Announce the number of rows of all segments, then store the tokens of each segment. The
    blocks store rows in turn."""
    me, height, senders = W.rank(), config.gate_up.M, config.senders
    if block == 0:
        for dst in T.serial(config.ranks):
            for e in T.serial(config.per_rank):
                W.announce(inbox[dst, e, me, 0, 0], counts[dst, e])
    before = T.alloc_var("int32")
    before = 0
    for e in T.serial(config.per_rank):
        for step in T.serial(config.ranks):
            peer = (me + step) % config.ranks
            count = counts[peer, e]
            for tile in T.serial(T.ceildiv(count, height)):
                rows = T.min(height, count - tile * height)
                for i in T.serial(T.ceildiv(rows - (block + step) % senders, senders)):
                    token = sent[before + tile * height + i * senders + (block + step) % senders]
                    # The row is no variable, so that one signal follows all rows of the tile.
                    W.put_block(
                        x[T.min(T.max(token, 0), config.tokens - 1), 0],
                        inbox[
                            peer, e, me, tile * height + i * senders + (block + step) % senders, 0
                        ],
                        config.hidden,
                    )
            before = before + count


@T.macro
def multiply(config, A, segment, row, weights, expert, n, buffers):
    """Compute a tile of the products of an expert."""
    T.clear(buffers.total)
    for step in T.Pipelined(T.ceildiv(config.K, config.tiles.K), num_stages=config.tiles.stages):
        k = step * config.tiles.K
        T.copy(A[(*segment, row, k)], buffers.A)
        load_weights(config, weights, expert, n, k, buffers.B)
        accumulate(config, buffers)


@T.macro
def read_counts(config, inbox, numbers):
    """Wait for the announced rows of all segments once, so that no tile waits for them."""
    for e in T.serial(config.per_rank):
        for source in T.serial(config.ranks):
            numbers[e * config.ranks + source] = W.announced(inbox[W.rank(), e, source, 0, 0])


def first_tile(block: Any, blocks: int, count: Any, before: Any) -> Any:
    """Return the first tile of a segment that a block computes; the next ones follow at distances
    of ``blocks``. Blocks compute the tiles of all segments in turn, so that they are equally busy.

    Args:
        block: number among the ``blocks`` blocks that compute tiles.
        count: tiles of the segment.
        before: tiles of all segments up to the end of this one.
    """
    return (block + blocks + count - before) % blocks


def gate_up(config: ExpertMlpConfig) -> Any:
    """Build the first program: silu(gate) * up of all tokens at this rank's experts."""
    product, tiles = config.gate_up_gemm, config.gate_up
    ranks, per_rank = config.ranks, config.per_rank
    columns, senders = ceil(config.width / product.tile_columns), config.senders
    blocks, row_tiles = config.blocks - senders, config.capacity // tiles.M

    @T.prim_func
    def gate_up(
        x: T.Tensor((config.tokens, config.hidden), config.dtype),
        sent: T.Tensor((config.tokens * config.choices,), "int32"),
        counts: T.Tensor((ranks, per_rank), "int32"),
        weights: product.w,
        received: T.Tensor((per_rank, ranks), "int32"),
        activations: T.Tensor((per_rank, ranks, config.capacity, config.width), config.dtype),
    ):
        with T.Kernel(config.blocks, threads=tiles.threads) as block:
            inbox = W.alloc_ragged(
                per_rank, rows=config.capacity, row=config.hidden, dtype=config.dtype
            )
            buffers = TileBuffers.alloc(product, product.tile_columns)
            me = W.rank()
            if block < senders:
                send(config, x, sent, counts, inbox, block)
            else:
                numbers = T.alloc_shared((config.padded_segments,), "int32", scope="shared")
                read_counts(config, inbox, numbers)
                before = T.alloc_var("int32")
                count = T.alloc_var("int32")
                m = T.alloc_var("int32")
                column = T.alloc_var("int32")
                before = 0
                for expert in T.serial(per_rank):
                    for step in T.serial(ranks):
                        peer = (me + (ranks - 1) * step) % ranks
                        count = numbers[expert * ranks + peer]
                        if block == senders:
                            received[expert, peer] = count
                        height = T.ceildiv(count, tiles.M)
                        before = before + height * columns
                        first = first_tile(block - senders, blocks, height * columns, before)
                        for wave in T.serial(T.ceildiv(height * columns - first, blocks)):
                            m = (first + wave * blocks) % height
                            column = (first + wave * blocks) // height
                            n = column * product.tile_columns
                            # m % row_tiles is m, and lets the compiler prove that the rows exist.
                            multiply(
                                product, inbox, (me, expert, peer), m % row_tiles * tiles.M,
                                weights, expert, n, buffers,
                            )  # fmt: skip
                            gate, up = halves_of(product, buffers.total)
                            multiply_by_silu(gate, up, buffers.total)
                            for i, j in T.Parallel(tiles.M, product.tile_columns):
                                buffers.total[i, j] = T.if_then_else(
                                    m * tiles.M + i < count, buffers.total[i, j], 0
                                )
                            T.copy(buffers.total[:, : product.tile_columns], buffers.C)
                            T.copy(buffers.C, activations[expert, peer, m * tiles.M, n])

    return with_options(gate_up, {"tileweave.reuse": "credit"})


@T.macro
def combine(config, place, topk_weights, results, out, block):
    """Compute the weighted sum of the results of each token, in the order of its choices, in
    fp32."""
    per_rank, capacity, vectors = config.per_rank, config.capacity, config.hidden // VECTOR
    row = T.alloc_fragment((config.padded_vectors, VECTOR), config.dtype)
    total = T.alloc_fragment((config.padded_vectors, VECTOR), "float32")
    for wave in T.serial(ceil(config.tokens / config.blocks)):
        token = wave * config.blocks + block
        if token < config.tokens:
            T.clear(total)
            for choice in T.serial(config.choices):
                number = place[token, choice]
                if number >= 0:
                    expert = number // capacity
                    owner, e, slot = expert // per_rank, expert % per_rank, number % capacity
                    for i, j in T.Parallel(config.padded_vectors, VECTOR):
                        if i < vectors:
                            row[i, j] = results[W.rank(), e, owner, slot, i * VECTOR + j]
                    for i, j in T.Parallel(config.padded_vectors, VECTOR):
                        if i < vectors:
                            total[i, j] += topk_weights[token, choice] * row[i, j]
            for i, j in T.Parallel(config.padded_vectors, VECTOR):
                if i < vectors:
                    out[token, i * VECTOR + j] = total[i, j]


@T.macro
def send_results(config, buffers, results, segment, m, row_tiles, count, column):
    """Store a tile of results on the rank of its tokens, ``PART`` rows at a time."""
    tiles, columns = config.tiles, config.N // config.tiles.N
    for first in T.unroll(0, tiles.N, tiles.width):
        T.copy(buffers.total[:, first : first + tiles.width], buffers.C)
        for part in T.serial(T.min(T.ceildiv(count - m * tiles.M, PART), tiles.M // PART)):
            # Row and column are no variables, so that one signal follows all rows of the tile, and
            # stores are vectorized.
            for i, j, lane in T.Parallel(PART, tiles.width // VECTOR, VECTOR):
                results[
                    (
                        *segment,
                        m % row_tiles * tiles.M + part * PART + i,
                        column % columns * tiles.N + first + j * VECTOR + lane,
                    )
                ] = buffers.C[part * PART + i, j * VECTOR + lane]


@T.macro
def announce_results(config, received, results):
    """Announce the rows of all segments of results, in multiples of ``PART``."""
    for e in T.serial(config.per_rank):
        for dst in T.serial(config.ranks):
            parts = T.ceildiv(received[e, dst], PART)
            W.announce(results[dst, e, W.rank(), 0, 0], parts * PART)


def down(config: ExpertMlpConfig) -> Any:
    """Build the second program: products with the weights of down, and the weighted sum of the
    results of each token."""
    product, tiles, ranks, per_rank = config.down_gemm, config.down, config.ranks, config.per_rank
    tokens, blocks = config.tokens, config.blocks
    columns = ceil(config.hidden / tiles.N)
    row_tiles = config.capacity // tiles.M

    @T.prim_func
    def down(
        activations: T.Tensor((per_rank, ranks, config.capacity, config.width), config.dtype),
        received: T.Tensor((per_rank, ranks), "int32"),
        weights: product.w,
        place: T.Tensor((tokens, config.choices), "int32"),
        topk_weights: T.Tensor((tokens, config.choices), "float32"),
        out: T.Tensor((tokens, config.hidden), config.dtype),
    ):
        with T.Kernel(2 * blocks, threads=tiles.threads) as block:
            results = W.alloc_ragged(
                per_rank, rows=config.capacity, row=config.hidden, dtype=config.dtype
            )
            buffers = TileBuffers.alloc(product, tiles.width)
            me = W.rank()
            if block < blocks:
                if block == 0:
                    announce_results(config, received, results)
                before = T.alloc_var("int32")
                m = T.alloc_var("int32")
                column = T.alloc_var("int32")
                before = 0
                for e in T.serial(per_rank):
                    for step in T.serial(ranks):
                        source = (me + 1 + step) % ranks
                        count = received[e, source]
                        height = T.ceildiv(count, tiles.M)
                        before = before + height * columns
                        first = first_tile(block, blocks, height * columns, before)
                        for wave in T.serial(T.ceildiv(height * columns - first, blocks)):
                            m = (first + wave * blocks) % height
                            column = (first + wave * blocks) // height
                            # column % columns is column, and is written for the same reason.
                            n = column % columns * tiles.N
                            multiply(
                                product, activations, (e, source), m % row_tiles * tiles.M,
                                weights, e, n, buffers,
                            )  # fmt: skip
                            # Computed again, so that they need no registers during the product.
                            m = (first + wave * blocks) % height
                            column = (first + wave * blocks) // height
                            send_results(
                                product, buffers, results, (source, e, me), m, row_tiles, count,
                                column,
                            )  # fmt: skip
            else:
                combine(config, place, topk_weights, results, out, block - blocks)

    return with_options(down, {"tileweave.granule": {"results": (1, 1, tiles.M, config.hidden)}})
