"""All-reduce: every rank receives the sum of the inputs of all ranks.

Contains the tile programs, one for small tensors and one for large ones, the plan for copy engines
with its kernel, and the torch operator with its gradient.
"""

from math import ceil, gcd
from typing import Any

import tilelang.language as T
import torch

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import Plan, PlanBuilder, plan
from ..core import nccl
from ..core.across_nodes import Mesh
from ..core.collective_problem import CollectiveProblem, require_exchangeable
from ..core.groups import TwoLevels
from ..core.library import call_pair
from ..core.registry import TableRow
from .all_gather import AllGather, collect
from .collective import Collective, Move, sum_of
from .reduce_scatter import ReduceScatter, add_up
from .transport import ROW_BYTES, SUMMED
from .vectors import LL_TILE, TiledView, copies_to, tile_bytes, with_ll_protocol

NAME = "all_reduce"
ONE_SHOT_BYTES = 1 << 19
"""Maximum number of bytes that each rank sends in the one-shot program. Estimated, not measured."""


def one_shot_program(view: TiledView, ranks: int):
    """Return the one-shot program for SMs: each rank stores x (rows, columns) to all, and every
    rank adds all of them in fp32.

    All ranks add in the same order: that of the ranks, beginning at another rank for each tile.
    """
    dtype = view.dtype

    @T.prim_func
    def all_reduce_one_shot(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric((ranks, *view.shape), dtype)
            tile_regs = T.alloc_fragment(view.tile, dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, first = W.rank(), block * view.height
            T.copy(x[first, 0], tile_regs)
            for step in T.serial(ranks):
                T.copy(tile_regs, arrived[(me + 1 + step) % ranks, me, first, 0])
            T.clear(total)
            for step in T.serial(ranks):
                T.copy(arrived[me, (block + step) % ranks, first, 0], tile_regs)
                for i, j in T.Parallel(view.height, view.columns):
                    total[i, j] += tile_regs[i, j]
            T.copy(total, tile_regs)
            T.copy(tile_regs, out[first, 0])

    return all_reduce_one_shot


def two_shot_program(view: TiledView, ranks: int):
    """Return the two-shot program for SMs: the owner of a tile adds it up and stores the sum to the
    others.

    All ranks own the same number of tiles; the last tiles may be past the end of the tensor.
    """
    dtype = view.dtype
    rows_per_rank = T.ceildiv(view.tiles, ranks) * view.height
    stride = rows_per_rank.astype("int64")  # TileLang multiplies it by the columns in its type

    @T.prim_func
    def all_reduce(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(rows_per_rank // view.height, threads=256) as block:
            # Contributions of the others to own tiles, and the sums of their tiles.
            partials = W.alloc_symmetric((ranks, rows_per_rank, view.columns), dtype)
            sums = W.alloc_symmetric((ranks, rows_per_rank, view.columns), dtype)
            tile_regs = T.alloc_fragment(view.tile, dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, first = W.rank(), block * view.height
            for step in T.serial(ranks - 1):
                owner = (me + ranks - 1 - step) % ranks  # in the order in which the owners add
                T.copy(x[owner * stride + first, 0], tile_regs)
                T.copy(tile_regs, partials[owner, me, first, 0])
            T.copy(x[me * stride + first, 0], tile_regs)
            add_up(total, tile_regs, partials, me, first, ranks)
            for step in T.serial(ranks - 1):
                T.copy(tile_regs, sums[(me + 1 + step) % ranks, me, first, 0])
            T.copy(tile_regs, out[me * stride + first, 0])
            for step in T.serial(ranks - 1):
                source = (me + ranks - 1 - step) % ranks  # in order of arrival
                T.copy(sums[me, source, first, 0], tile_regs)
                T.copy(tile_regs, out[source * stride + first, 0])

    return all_reduce


@T.macro
def add_in_order(partials_shared, total, ranks):
    """Add the tiles of all ranks in fp32, in the order of the ranks."""
    T.clear(total)
    for rank in T.serial(ranks):
        for i, j in T.Parallel(*total.shape):
            total[i, j] += partials_shared[rank, i, j]


def one_shot_ll_program(view: TiledView, ranks: int):
    """Return the one-shot program for small tensors: each rank stores x (rows, columns) as words
    with flags to all, itself included, and every rank adds all of them, in the order of the
    ranks."""
    height, columns, dtype = view.height, view.columns, view.dtype

    @T.prim_func
    def all_reduce_one_shot_ll(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric((ranks, *view.shape), dtype)
            partials_shared = T.alloc_shared((ranks, *view.tile), dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, m = W.rank(), block * height
            for step in T.serial(ranks):
                T.copy(
                    x[m : m + height, 0:columns],
                    arrived[(me + 1 + step) % ranks, me, m : m + height, 0:columns],
                )
            T.copy(arrived[me, 0:ranks, m : m + height, 0:columns], partials_shared)
            add_in_order(partials_shared, total, ranks)
            T.copy(total, out[m, 0])

    return with_ll_protocol(all_reduce_one_shot_ll, "arrived")


def two_shot_ll_program(view: TiledView, ranks: int):
    """Return the two-shot program for small tensors: each rank stores the tiles of x as words with
    flags to their owners, which add them in the order of the ranks and store the sums to all. The
    result has the bits of ``one_shot_ll_program``."""
    height, columns, dtype = view.height, view.columns, view.dtype
    rows_per_rank = ceil(view.tiles / ranks) * height

    @T.prim_func
    def all_reduce_ll(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(rows_per_rank // height, threads=256) as block:
            partials = W.alloc_symmetric((ranks, rows_per_rank, columns), dtype)
            sums = W.alloc_symmetric((ranks, rows_per_rank, columns), dtype)
            partials_shared = T.alloc_shared((ranks, *view.tile), dtype)
            sum_shared = T.alloc_shared(view.tile, dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, m = W.rank(), block * height
            for step in T.serial(ranks):
                owner = (me + 1 + step) % ranks
                first = owner * rows_per_rank + m
                T.copy(
                    x[first : first + height, 0:columns],
                    partials[owner, me, m : m + height, 0:columns],
                )
            T.copy(partials[me, 0:ranks, m : m + height, 0:columns], partials_shared)
            add_in_order(partials_shared, total, ranks)
            T.copy(total, sum_shared)
            for step in T.serial(ranks):
                T.copy(sum_shared, sums[(me + 1 + step) % ranks, me, m : m + height, 0:columns])
            for step in T.serial(ranks):
                source = (me + ranks - step) % ranks
                first = source * rows_per_rank + m
                T.copy(
                    sums[me, source, m : m + height, 0:columns],
                    out[first : first + height, 0:columns],
                )

    return with_ll_protocol(all_reduce_ll, "partials", "sums")


def add_and_share(view: TiledView, ranks: int):
    """Return the kernel that adds the partials which copy engines write, stores the sums to the
    others, and collects theirs: the second half of ``two_shot_program``."""
    dtype = view.dtype

    @T.prim_func
    def add_and_share(
        x: T.Tensor((ranks, *view.shape), dtype),
        partials: W.Symmetric((ranks, *view.shape), dtype),
        sums: W.Symmetric((ranks, *view.shape), dtype),
        out: T.Tensor((ranks, *view.shape), dtype),
    ):
        with T.Kernel(view.tiles, threads=256) as block:
            tile_regs = T.alloc_fragment(view.tile, dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, first = W.rank(), block * view.height
            T.copy(x[me, first, 0], tile_regs)
            add_up(total, tile_regs, partials, me, first, ranks)
            for step in T.serial(ranks - 1):
                T.copy(tile_regs, sums[(me + 1 + step) % ranks, me, first, 0])
            T.copy(tile_regs, out[me, first, 0])
            collect(tile_regs, sums, out, me, first, ranks)

    return add_and_share


def all_reduce_plan(view: TiledView, ranks: int, chunks: list[slice]) -> Plan:
    """Return the plan for copy engines: they copy the parts of x (ranks, rows, columns) to their
    owners, those of the last peer in chunks. A kernel adds the partials that have arrived, and
    stores the sums to the others, while the rest is in flight."""
    kernel, dtype = add_and_share(view, ranks), view.dtype

    @plan
    def all_reduce(
        p: PlanBuilder,
        x: T.Tensor((ranks, *view.shape), dtype),
        partials: W.Symmetric((ranks, *view.shape), dtype),
        sums: W.Symmetric((ranks, *view.shape), dtype),
        out: T.Tensor((ranks, *view.shape), dtype),
    ):
        for peer, chunk in copies_to(reversed([*p.peers()]), chunks):  # in the order of addition
            p.copy(partials[peer, p.rank, chunk], x[peer, chunk], stream="copies")
        p.launch(kernel, x, partials, sums, out)

    return all_reduce


def is_one_shot(problem: CollectiveProblem) -> bool:
    """Return whether the one-shot program is faster. It communicates once, but more bytes."""
    return (problem.ranks - 1) * problem.nbytes <= ONE_SHOT_BYTES


class AllReduce(Collective, op=NAME):
    """All-reduce by addition."""

    row = TableRow(
        inputs="any shape, bf16, fp16, fp32",
        result="their sum",
        gradient="nothing is communicated, as in `matmul_all_reduce`",
        memory="`copy_engine` 2; `ldst` 2 W (one-shot) or 4 (two-shot); `ll` twice that",
        sent="2 x (W - 1) / W x S",
    )
    dtypes = SUMMED
    adds = True
    reference_in_place = True
    copy_engine_min_ranks = 2
    ll_bytes = 1 << 20  # the two-shot program sends an eighth of its input to each of 8 ranks

    @staticmethod
    def result(x, ranks):
        require_exchangeable(NAME, x, 0)
        return tuple(x.shape), ()

    @staticmethod
    def steps(problem: CollectiveProblem, transport: str):
        ranks, dtype = problem.ranks, problem.tile_dtype
        if transport == "ll":
            program = one_shot_ll_program if is_one_shot(problem) else two_shot_ll_program
            return program(TiledView.of(problem.elements, dtype, tile=LL_TILE), ranks)
        if transport != "copy_engine":
            tile = tile_bytes(problem.nbytes // ranks)  # the blocks of a rank share these bytes
            view = TiledView.of(problem.elements, dtype, tile=tile)
            program = one_shot_program if is_one_shot(problem) else two_shot_program
            return program(view, ranks)
        view = TiledView.of(problem.elements // ranks, dtype)
        return all_reduce_plan(view, ranks, view.chunks(moved=ranks + 1))

    @classmethod
    def obstacle(cls, problem, transport):
        if transport == "copy_engine" and problem.elements % problem.ranks:
            return f"x has {problem.elements} elements; expected a multiple of {problem.ranks}"
        return super().obstacle(problem, transport)

    @staticmethod
    def reference(x, out, group):
        nccl.all_reduce(out, group)

    @staticmethod
    def expected(inputs, rank):
        return sum_of(inputs)

    @staticmethod
    def sent_bytes(nbytes, ranks):
        return 2 * nbytes * (ranks - 1) // ranks

    @staticmethod
    def symmetric_inputs(problem):
        return 2, 2 * problem.ranks if is_one_shot(problem) else 4

    @staticmethod
    def within(problem: CollectiveProblem, ranks: TwoLevels):
        elements = padded_elements(problem.elements, problem.dtype, ranks.world_size)
        return ReduceScatter, (elements // ranks.nodes.world_size,), ()

    @staticmethod
    def across(move: Move, x: torch.Tensor, out: torch.Tensor, mesh: Mesh) -> None:
        """Reduce-scatter over all ranks, then all-gather; zeros fill up the parts."""
        elements = padded_elements(x.numel(), x.dtype, mesh.world_size)
        is_whole = elements == x.numel()
        padded, total = x.reshape(-1), out.view(-1)
        if not is_whole:
            padded = torch.nn.functional.pad(padded, (0, elements - x.numel()))
            total = torch.empty_like(padded)
        part = padded.new_empty(elements // mesh.world_size)
        ReduceScatter.across(move, padded, part, mesh)
        AllGather.across(move, part, total, mesh)
        if not is_whole:
            out.view(-1).copy_(total[: x.numel()])

    @staticmethod
    def gradient(grad, group, transport):
        return grad.clone()


def padded_elements(elements: int, dtype: torch.dtype, ranks: int) -> int:
    """Return a number of elements, increased to equal parts of whole ``ROW_BYTES`` for all
    ranks."""
    unit = ranks * (ROW_BYTES // gcd(ROW_BYTES, dtype.itemsize))
    return ceil(elements / unit) * unit


@brief_errors
def all_reduce(
    x: torch.Tensor, group: Any = None, *, out: torch.Tensor | None = None, transport: str = "auto"
) -> torch.Tensor:
    """Sum the inputs of all ranks, on every rank.

    All ranks receive the same bits, and equal inputs give equal bits: values are added in fp32, in
    an order that docs/guides/ops.md defines, and rounded once. ``nccl`` rounds and adds as NCCL
    does. On several nodes the sum of each node is rounded, and these sums are added in fp32.

    The gradient is that of a tensor-parallel layer: all ranks compute the same function of the
    result, so its gradient is assumed equal on all ranks, and nothing is communicated.

    Every rank calls it with the same shape; the first call with a new one compiles, collectively.

    Args:
        x: of any shape, bf16, fp16 or fp32; with ``nccl`` any type that it adds.
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        out: of the same shape, contiguous; receives the result, and may be ``x``. Not
            differentiable.
        transport: ``copy_engine``, ``ldst``, ``ll``, ``nccl`` (``torch.distributed``), or
            ``auto``; see ``transport_of``.

    Returns:
        The sum, in the shape and type of ``x``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return call_pair(NAME, (x,), group, out, transport)
