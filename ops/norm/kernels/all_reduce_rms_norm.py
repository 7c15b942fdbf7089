"""Tile programs that add the rows of all ranks and a residual, normalize, and quantize.

Blocks that send come first, then those that wait, so a block waits only for blocks of lower index.
A block handles one row (token), or one row for one peer::

    one-shot   | send a row to a rank | add the rows of all ranks, normalize |
    two-shot   | send a row to its owner | add, send to all ranks | normalize |

Programs add in fp32, in the order of the ranks, and round once. All ranks, both programs and all
numbers of tokens therefore yield the same bits. Rows from a number on that a tensor holds may be
padding; blocks of these rows do nothing.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import tilelang.language as T

from ....builtins import language as W
from ...core.quantize import FP8_MAX

WIDTH = 8
"""Elements of a vector: 16 bytes of a 16-bit type."""
GROUP = 128
"""Columns that have one scale."""
LEAST_AMAX = 1e-10
"""Least maximum of a group; avoids scales of zero. That of vLLM."""
_LANES = GROUP // WIDTH
"""Vectors of a group."""
_THREADS = 64, 512
"""Least and most threads of a block, powers of two."""
_HELD = 16
"""Maximum number of vectors of partials that a thread holds between a wait and their addition."""
STATIC, GROUPED = QUANTIZATIONS = ("fp8", "fp8_1x128")
"""Values of ``quant``: one given scale, or one scale for each group."""
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class NormConfig:
    """Parameters of a program.

    Attributes:
        tokens, hidden: rows, and elements of a row, a multiple of ``WIDTH``.
        dtype: type of the rows, as TileLang writes it; a 16-bit type.
        eps: added to the mean square.
        biased: whether a bias is added to the normalized rows.
        quant: one of ``QUANTIZATIONS``, or None.
        threads: threads of a block; None for ``threads_for``.
        limited: whether a tensor holds the number of valid rows, which come first.
    """

    tokens: int
    hidden: int
    ranks: int
    dtype: str
    eps: float
    biased: bool = False
    quant: str | None = None
    threads: int | None = None
    limited: bool = False

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.hidden // WIDTH

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads or threads_for(self.vectors)

    @property
    def groups(self) -> int:
        """Groups of a row in registers. Threads share them equally, as TileLang needs it."""
        return ceil(self.vectors / self.block) * self.block // _LANES

    @property
    def tile(self) -> tuple[int, int, int]:
        """Shape of a row in registers."""
        return self.groups, _LANES, WIDTH

    @property
    def is_padded(self) -> bool:
        """True if a row has less vectors than its registers."""
        return self.vectors < self.groups * _LANES

    @property
    def scales_per_row(self) -> int:
        """Groups of a row in memory."""
        return ceil(self.hidden / GROUP)

    @property
    def held(self) -> int:
        """Ranks whose partials a block loads at once."""
        return min(self.ranks, max(1, _HELD * self.block // (self.groups * _LANES)))

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank owns in the two-shot program; the last may not exist."""
        return ceil(self.tokens / self.ranks)

    @property
    def rows(self) -> Any:
        """Declaration of the rows of all tokens."""
        return T.Tensor((self.tokens, self.vectors, WIDTH), self.dtype)

    @property
    def columns(self) -> Any:
        """Declaration of a weight or bias."""
        return T.Tensor((self.vectors, WIDTH), self.dtype)

    @property
    def bias(self) -> Any:
        """Declaration of the bias, or None."""
        return self.columns if self.biased else None

    @property
    def scale(self) -> Any:
        """Declaration of the given scale, or None."""
        return T.Tensor((1,), "float32") if self.quant == STATIC else None

    @property
    def num_tokens(self) -> Any:
        """Declaration of the number of valid rows, or None."""
        return T.Tensor((1,), "int32") if self.limited else None

    @property
    def results(self) -> tuple[Any, Any, Any]:
        """Declarations of the new residual, the scales or None, and the normalized rows."""
        scales = (
            T.Tensor((self.tokens, self.scales_per_row), "float32")
            if self.quant == GROUPED
            else None
        )
        out = T.Tensor((self.tokens, self.vectors, WIDTH), FP8) if self.quant else self.rows
        return self.rows, scales, out


def threads_for(vectors: int) -> int:
    """Return the threads of a block for rows of ``vectors`` vectors: one for each, up to a limit.

    A thread of a small block may use enough registers for several vectors of several ranks.
    """
    least, most = _THREADS
    return min(max(1 << (vectors - 1).bit_length(), least), most)


def is_valid(config: NormConfig, num_tokens: Any, token: Any) -> Any:
    """Return the condition that a row is valid; ``True`` if all rows are."""
    return token < W.rank_uniform(num_tokens[0]) if config.limited else True


class RowBuffers(NamedTuple):
    """Registers of a block for one row.

    Attributes:
        row: the row, in the type of the tensors.
        total: a sum or a normalized row, in fp32.
        partials: the row of some ranks.
        weight, bias: weight, and bias or None.
    """

    row: Any
    total: Any
    partials: Any
    weight: Any
    bias: Any

    @staticmethod
    def alloc(config: NormConfig) -> "RowBuffers":
        """Allocate the registers."""
        return RowBuffers(*_alloc(config))


@T.macro
def _alloc(config):
    row = T.alloc_fragment(config.tile, config.dtype)
    weight = T.alloc_fragment(config.tile, config.dtype)
    total = T.alloc_fragment(config.tile, "float32")
    partials = T.alloc_fragment((config.held, *config.tile), config.dtype)
    bias = T.alloc_fragment(config.tile, config.dtype) if config.biased else None
    return row, total, partials, weight, bias


@T.macro
def load(config, tensor, place, row):
    """Load the row at a place of a tensor; registers past its end become zero."""
    if config.is_padded:
        T.clear(row)
    for g, v, j in T.Parallel(*config.tile):
        if g * _LANES + v < config.vectors:
            row[g, v, j] = tensor[(*place, g * _LANES + v, j)]


@T.macro
def store(config, row, tensor, place):
    """Store a row at a place of a tensor."""
    for g, v, j in T.Parallel(*config.tile):
        if g * _LANES + v < config.vectors:
            tensor[(*place, g * _LANES + v, j)] = row[g, v, j]


@T.macro
def load_parameters(config, weight, bias, buffers):
    """Load weight and bias, before the block waits for anything."""
    load(config, weight, (), buffers.weight)
    if config.biased:
        load(config, bias, (), buffers.bias)


@T.macro
def add_partials(config, partials, place, residual, token, buffers):
    """Add the residual and the partials at a place, in the order of the ranks, and round the sum.

    The partials of ``config.held`` ranks are loaded by one statement. So they have one counter, and
    their loads are in flight together.
    """
    held, total, row = buffers.partials, buffers.total, buffers.row
    load(config, residual, (token,), total)
    for first in T.unroll(ceil(config.ranks / config.held)):
        for r, g, v, j in T.Parallel(config.held, *config.tile):
            if first * config.held + r < config.ranks and g * _LANES + v < config.vectors:
                held[r, g, v, j] = partials[(*place, first * config.held + r, g * _LANES + v, j)]
        for r in T.unroll(config.held):
            if first * config.held + r < config.ranks:
                for g, v, j in T.Parallel(*config.tile):
                    if g * _LANES + v < config.vectors:
                        total[g, v, j] += held[r, g, v, j]
    T.copy(total, row)


@T.macro
def normalize(config, buffers):
    """Replace the row by the normalized one."""
    row, total, weight = buffers.row, buffers.total, buffers.weight
    squares = T.alloc_fragment(config.tile, "float32")
    of_vectors = T.alloc_fragment(config.tile[:2], "float32")
    of_groups = T.alloc_fragment(config.tile[:1], "float32")
    of_row = T.alloc_fragment((1,), "float32")
    for g, v, j in T.Parallel(*config.tile):
        total[g, v, j] = row[g, v, j]
        squares[g, v, j] = total[g, v, j] * total[g, v, j]
    T.reduce_sum(squares, of_vectors, dim=2)
    T.reduce_sum(of_vectors, of_groups, dim=1)
    T.reduce_sum(of_groups, of_row, dim=0)
    of_row[0] = T.rsqrt(of_row[0] / config.hidden + T.float32(config.eps))
    for g, v, j in T.Parallel(*config.tile):
        total[g, v, j] = total[g, v, j] * of_row[0] * weight[g, v, j]
    if config.biased:
        for g, v, j in T.Parallel(*config.tile):
            total[g, v, j] += buffers.bias[g, v, j]
    T.copy(total, row)


@T.macro
def finish(config, token, scale, buffers, residual_out, scales, out):
    """Store the row as the new residual, normalize, quantize and store it."""
    store(config, buffers.row, residual_out, (token,))
    normalize(config, buffers)
    if config.quant is not None:
        quantize(config, token, scale, buffers, scales, out)
    else:
        store(config, buffers.row, out, (token,))


@T.macro
def quantize(config, token, scale, buffers, scales, out):
    """Store the row in fp8, and its scales if they are not given."""
    total, row = buffers.total, buffers.row
    fp8 = T.alloc_fragment(config.tile, FP8)
    of_vectors = T.alloc_fragment(config.tile[:2], "float32")
    of_groups = T.alloc_fragment(config.tile[:1], "float32")
    for g, v, j in T.Parallel(*config.tile):
        total[g, v, j] = row[g, v, j]
    if config.quant == GROUPED:
        T.reduce_absmax(total, of_vectors, dim=2)
        T.reduce_max(of_vectors, of_groups, dim=1)
        for g in T.Parallel(config.groups):
            of_groups[g] = T.max(of_groups[g], LEAST_AMAX) / FP8_MAX
        for g in T.Parallel(config.groups):
            if g < config.scales_per_row:
                scales[token, g] = of_groups[g]
        for g, v, j in T.Parallel(*config.tile):
            total[g, v, j] = total[g, v, j] / of_groups[g]
    else:
        for g, v, j in T.Parallel(*config.tile):
            total[g, v, j] = total[g, v, j] / scale[0]
    for g, v, j in T.Parallel(*config.tile):
        fp8[g, v, j] = T.min(T.max(total[g, v, j], -FP8_MAX), FP8_MAX)
    store(config, fp8, out, (token,))


def local_program(config: NormConfig):
    """Return the program of a group of one rank."""
    residual_out, scales, out = config.results

    @T.prim_func
    def all_reduce_rms_norm_local(
        x: config.rows,
        residual: config.rows,
        weight: config.columns,
        bias: config.bias,
        scale: config.scale,
        num_tokens: config.num_tokens,
        residual_out: residual_out,
        scales: scales,
        out: out,
    ):
        with T.Kernel(config.tokens, threads=config.block) as token:
            buffers = RowBuffers.alloc(config)
            if is_valid(config, num_tokens, token):
                load_parameters(config, weight, bias, buffers)
                load(config, residual, (token,), buffers.total)
                load(config, x, (token,), buffers.row)
                for g, v, j in T.Parallel(*config.tile):
                    buffers.total[g, v, j] += buffers.row[g, v, j]
                T.copy(buffers.total, buffers.row)
                finish(config, token, scale, buffers, residual_out, scales, out)

    return all_reduce_rms_norm_local


def one_shot_program(config: NormConfig):
    """Return the program in which every rank stores its rows to all ranks, and adds the rows of
    all."""
    tokens, ranks, shape = config.tokens, config.ranks, (config.vectors, WIDTH)
    sends = tokens * ranks
    residual_out, scales, out = config.results

    @T.prim_func
    def all_reduce_rms_norm_one_shot(
        x: config.rows,
        residual: config.rows,
        weight: config.columns,
        bias: config.bias,
        scale: config.scale,
        num_tokens: config.num_tokens,
        residual_out: residual_out,
        scales: scales,
        out: out,
    ):
        with T.Kernel(sends + tokens, threads=config.block) as block:
            arrived = W.alloc_symmetric((tokens, ranks, *shape), config.dtype)
            buffers = RowBuffers.alloc(config)
            me = W.rank()
            if block < sends:
                if is_valid(config, num_tokens, block // ranks):
                    load(config, x, (block // ranks,), buffers.row)
                    peer = (me + 1 + block % ranks) % ranks
                    store(config, buffers.row, arrived, (peer, block // ranks, me))
            else:
                token = block - sends
                if is_valid(config, num_tokens, token):
                    load_parameters(config, weight, bias, buffers)
                    add_partials(config, arrived, (me, token), residual, token, buffers)
                    finish(config, token, scale, buffers, residual_out, scales, out)

    return all_reduce_rms_norm_one_shot


def two_shot_program(config: NormConfig):
    """Return the program in which every rank stores its rows to their owners. The owner of a row
    adds, and stores the new residual to all ranks.

    Every rank normalizes all rows: to send normalized rows too would double what is sent. Rank r
    owns the rows r, r + W, and so on.
    """
    tokens, ranks, shape = config.tokens, config.ranks, (config.vectors, WIDTH)
    owned = config.rows_per_rank
    residual_out, scales, out = config.results

    @T.prim_func
    def all_reduce_rms_norm_two_shot(
        x: config.rows,
        residual: config.rows,
        weight: config.columns,
        bias: config.bias,
        scale: config.scale,
        num_tokens: config.num_tokens,
        residual_out: residual_out,
        scales: scales,
        out: out,
    ):
        with T.Kernel(2 * tokens + owned, threads=config.block) as block:
            partials = W.alloc_symmetric((owned, ranks, *shape), config.dtype)
            sums = W.alloc_symmetric((tokens, *shape), config.dtype)
            buffers = RowBuffers.alloc(config)
            me = W.rank()
            if block < tokens:
                if is_valid(config, num_tokens, block):
                    load(config, x, (block,), buffers.row)
                    store(config, buffers.row, partials, (block % ranks, block // ranks, me))
            elif block < tokens + owned:
                number = block - tokens
                token = number * ranks + me
                if token < tokens:
                    if is_valid(config, num_tokens, token):
                        add_partials(config, partials, (me, number), residual, token, buffers)
                        for step in T.serial(ranks):
                            store(config, buffers.row, sums, ((me + 1 + step) % ranks, token))
            else:
                token = block - tokens - owned
                if is_valid(config, num_tokens, token):
                    load_parameters(config, weight, bias, buffers)
                    load(config, sums, (me, token), buffers.row)
                    finish(config, token, scale, buffers, residual_out, scales, out)

    return all_reduce_rms_norm_two_shot
