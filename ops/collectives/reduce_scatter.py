"""Reduce-scatter: every rank receives its part of the sum of all inputs.

Contains the plan for copy engines with its kernel, the tile program for SMs, and the torch operator
with its gradient.
"""

from typing import Any

import tilelang.language as T
import torch

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import Plan, PlanBuilder, plan
from ..core import nccl
from ..core.across_nodes import Mesh, sum_over_nodes
from ..core.collective_problem import CollectiveProblem, extent_per_rank, require_exchangeable
from ..core.groups import TwoLevels
from ..core.library import call_pair
from ..core.registry import TableRow
from .collective import Collective, Move, sum_of
from .transport import SUMMED
from .vectors import TiledView, copies_to

NAME = "reduce_scatter"


@T.macro
def add_up(total, tile_regs, partials, me, first, ranks):
    """Add the contributions of the other ranks to ``tile_regs``, this rank's tile, in fp32: the
    right neighbor's first, then its right neighbor's, and so on."""
    rows, columns = total.shape
    for i, j in T.Parallel(rows, columns):
        total[i, j] = tile_regs[i, j]
    for step in T.serial(ranks - 1):
        T.copy(partials[me, (me + 1 + step) % ranks, first, 0], tile_regs)
        for i, j in T.Parallel(rows, columns):
            total[i, j] += tile_regs[i, j]
    T.copy(total, tile_regs)


def reduce_scatter_program(view: TiledView, ranks: int):
    """Return the program for SMs: each rank stores the parts of x (ranks, rows, columns) to their
    owners, which add them."""
    dtype = view.dtype

    @T.prim_func
    def reduce_scatter(x: T.Tensor((ranks, *view.shape), dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            partials = W.alloc_symmetric((ranks, *view.shape), dtype)  # contributions of the others
            tile_regs = T.alloc_fragment(view.tile, dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, first = W.rank(), block * view.height
            for step in T.serial(ranks - 1):
                owner = (me + ranks - 1 - step) % ranks  # in the order in which the owners add
                T.copy(x[owner, first, 0], tile_regs)
                T.copy(tile_regs, partials[owner, me, first, 0])
            T.copy(x[me, first, 0], tile_regs)
            add_up(total, tile_regs, partials, me, first, ranks)
            T.copy(tile_regs, out[first, 0])

    return reduce_scatter


def add_partials(view: TiledView, ranks: int):
    """Return the kernel that adds the partials which copy engines write."""
    dtype = view.dtype

    @T.prim_func
    def add_partials(
        x: T.Tensor((ranks, *view.shape), dtype),
        partials: W.Symmetric((ranks, *view.shape), dtype),
        out: T.Tensor(view.shape, dtype),
    ):
        with T.Kernel(view.tiles, threads=256) as block:
            tile_regs = T.alloc_fragment(view.tile, dtype)
            total = T.alloc_fragment(view.tile, "float32")
            me, first = W.rank(), block * view.height
            T.copy(x[me, first, 0], tile_regs)
            add_up(total, tile_regs, partials, me, first, ranks)
            T.copy(tile_regs, out[first, 0])

    return add_partials


def reduce_scatter_plan(view: TiledView, ranks: int, chunks: list[slice]) -> Plan:
    """Return the plan for copy engines: they copy the parts of x (ranks, rows, columns) to their
    owners, those of the last peer in chunks. A kernel adds the partials that have arrived while
    others are in flight."""
    kernel, dtype = add_partials(view, ranks), view.dtype

    @plan
    def reduce_scatter(
        p: PlanBuilder,
        x: T.Tensor((ranks, *view.shape), dtype),
        partials: W.Symmetric((ranks, *view.shape), dtype),
        out: T.Tensor(view.shape, dtype),
    ):
        for peer, chunk in copies_to(reversed([*p.peers()]), chunks):  # in the order of addition
            p.copy(partials[peer, p.rank, chunk], x[peer, chunk], stream="copies")
        p.launch(kernel, x, partials, out)

    return reduce_scatter


class ReduceScatter(Collective, op=NAME):
    """Reduce-scatter along the first axis."""

    row = TableRow(
        inputs="(W x N, ...), bf16, fp16, fp32",
        result="its part of their sum, (N, ...)",
        gradient="`all_gather`, by the same transport",
        memory="`copy_engine` 1; `ldst` 2",
        sent="(W - 1) / W x S",
    )
    dtypes = SUMMED
    adds = True
    copy_engine_min_ranks = 3

    @staticmethod
    def result(x, ranks):
        require_exchangeable(NAME, x, 1)
        return (extent_per_rank(NAME, x, 0, ranks), *x.shape[1:]), ()

    @staticmethod
    def steps(problem: CollectiveProblem, transport: str):
        ranks = problem.ranks
        view = TiledView.of(problem.elements // ranks, problem.tile_dtype)
        if transport != "copy_engine":
            return reduce_scatter_program(view, ranks)
        return reduce_scatter_plan(view, ranks, view.chunks(moved=ranks + 1))

    @staticmethod
    def reference(x, out, group):
        nccl.reduce_scatter(x, out, group)

    @staticmethod
    def expected(inputs, rank):
        return sum_of(inputs.chunk(len(inputs), 1)[rank])

    @staticmethod
    def symmetric_inputs(problem):
        return 1, 2

    @staticmethod
    def within(problem: CollectiveProblem, ranks: TwoLevels):
        rows, *others = problem.shape
        return ReduceScatter, (rows // ranks.nodes.world_size, *others), ()

    @staticmethod
    def across(move: Move, x: torch.Tensor, out: torch.Tensor, mesh: Mesh) -> None:
        """Add the part of another node within this node and send it while the next part is added;
        see ``sum_over_nodes``."""
        parts = x.unflatten(0, (mesh.nodes, -1))
        sum_over_nodes(lambda node, part: move(ReduceScatter, parts[node], part), out, mesh)

    @staticmethod
    def gradient(grad, group, transport):
        return torch.ops.tileweave.all_gather(grad, group, transport)


@brief_errors
def reduce_scatter(
    x: torch.Tensor, group: Any = None, *, out: torch.Tensor | None = None, transport: str = "auto"
) -> torch.Tensor:
    """Return this rank's part, along the first axis, of the sum of all inputs.

    Values are added in fp32 and rounded once. Each rank adds its own first, then its right
    neighbor's, and so on. So equal inputs give equal bits. ``nccl`` rounds and adds as NCCL does.
    On several nodes the sum of each node is rounded, and these sums are added in the same order.

    Every rank calls it with the same shape; the first call with a new one compiles, collectively.

    Args:
        x: (ranks * N, ...), bf16, fp16 or fp32; with ``nccl`` any type that it adds.
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        out: (N, ...), contiguous; receives the result, and may be this rank's part of ``x``. Not
            differentiable.
        transport: ``copy_engine``, ``ldst``, ``nccl`` (``torch.distributed``), or ``auto``; see
            ``transport_of``.

    Returns:
        (N, ...), in the type of ``x``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return call_pair(NAME, (x,), group, out, transport)
