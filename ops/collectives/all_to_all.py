"""All-to-all: every rank receives its part of each rank's input; axes may be exchanged.

Contains the tile programs, one of them for small inputs, and the torch operator with its gradient.
"""

from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any

import tilelang.language as T
import torch
from tvm import tirx

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import PlanBuilder, plan
from ..core import nccl
from ..core.across_nodes import Mesh, pieces_of_nodes
from ..core.collective_problem import (
    CollectiveProblem,
    axis_of,
    extent_per_rank,
    require_exchangeable,
)
from ..core.groups import TwoLevels
from ..core.library import call_pair
from ..core.registry import TableRow
from .collective import Collective, Move
from .transport import LL_BYTES
from .vectors import (
    COLUMNS,
    LL_TILE,
    height_of,
    tile_bytes,
    with_ll_protocol,
    words_of,
)  # fmt: skip

NAME = "all_to_all"


@dataclass(frozen=True)
class Parts:
    """Memory layout of the parts of an all-to-all.

    A part is (outer, rows, width). The ranks' axis comes before or after the rows, in the input and
    in the result.

    Attributes:
        height, columns: rows, and elements of a row, of a tile.
        dtype: type in which ``width`` counts elements.
        x_ranks_last, out_ranks_last: whether the ranks' axis comes after the rows, in the input and
            in the result.
    """

    ranks: int
    outer: int
    rows: int
    width: int
    height: int
    columns: int
    dtype: str
    x_ranks_last: bool
    out_ranks_last: bool

    @staticmethod
    def of(problem: CollectiveProblem, tile: int | None = None) -> "Parts":
        """Return the layout of a problem.

        Args:
            tile: bytes of a tile, a power of two; by default ``tile_bytes``.
        """
        shape, ranks = problem.shape, problem.ranks
        scatter, gather = problem.options
        low, high = min(scatter, gather), max(scatter, gather)
        if scatter == gather:
            outer, rows = 1, prod(shape[:low])
            ranks_last = rows > 1, rows > 1
        else:
            outer, rows = prod(shape[:low]), prod(shape[low:high])
            ranks_last = scatter > gather, gather > scatter
        if scatter < gather:
            rows //= ranks
        dtype, width = words_of(problem.nbytes // (ranks * outer * rows))
        columns = gcd(width, COLUMNS)
        if ranks_last == (False, False):  # no gaps on either side: use short, adjacent rows
            rows, width = width // columns, columns
        height = height_of(columns, dtype, tile or tile_bytes(problem.nbytes // ranks))
        return Parts(ranks, outer, rows, width, height, columns, dtype, *ranks_last)

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles along the rows, where the last may be partial, and along a row."""
        return ceil(self.rows / self.height), self.width // self.columns

    def place_of(self, block: tirx.PrimExpr) -> tuple[tirx.PrimExpr, ...]:
        """Return where the tile of a block begins: the index along ``outer``, the row, and the
        column."""
        tiles, wide = self.tiles
        tile = block // wide
        return tile // tiles, tile % tiles * self.height, block % wide * self.columns

    def shape(self, ranks_last: bool) -> tuple[int, ...]:
        """Return the shape of the input or the result, with an axis of extent 1 where the ranks'
        axis could be."""
        if ranks_last:
            return self.outer, self.rows, self.ranks, self.width
        return self.outer, self.ranks, self.rows, 1, self.width


def all_to_all_program(parts: Parts):
    """Return the program for SMs: each rank stores its parts to the others, which copy them to
    their positions."""
    ranks, outer, width, height, columns, dtype = (
        parts.ranks, parts.outer, parts.width, parts.height, parts.columns, parts.dtype,
    )  # fmt: skip
    x_ranks_last, out_ranks_last = parts.x_ranks_last, parts.out_ranks_last
    tiles, wide = parts.tiles

    @T.prim_func
    def all_to_all(
        x: T.Tensor(parts.shape(x_ranks_last), dtype),
        out: T.Tensor(parts.shape(out_ranks_last), dtype),
    ):
        with T.Kernel(outer * tiles * wide, threads=256) as block:
            arrived = W.alloc_symmetric((ranks, outer, parts.rows, 1, width), dtype)
            tile_regs = T.alloc_fragment((height, 1, columns), dtype)
            me, (o, m, n) = W.rank(), parts.place_of(block)
            for step in T.serial(ranks - 1):
                peer = (me + 1 + step) % ranks
                T.copy(x[o, m, peer, n] if x_ranks_last else x[o, peer, m, 0, n], tile_regs)
                T.copy(tile_regs, arrived[peer, me, o, m, 0, n])
            T.copy(x[o, m, me, n] if x_ranks_last else x[o, me, m, 0, n], tile_regs)
            T.copy(tile_regs, out[o, m, me, n] if out_ranks_last else out[o, me, m, 0, n])
            for step in T.serial(ranks - 1):
                source = (me + ranks - 1 - step) % ranks  # in order of arrival
                T.copy(arrived[me, source, o, m, 0, n], tile_regs)
                T.copy(
                    tile_regs, out[o, m, source, n] if out_ranks_last else out[o, source, m, 0, n]
                )

    return all_to_all


def all_to_all_ll_program(parts: Parts):
    """Return the program for small inputs: each rank stores its parts as words with flags to all,
    itself included, which copy them to their positions."""
    ranks, outer, width, height, columns, dtype = (
        parts.ranks, parts.outer, parts.width, parts.height, parts.columns, parts.dtype,
    )  # fmt: skip
    x_ranks_last, out_ranks_last = parts.x_ranks_last, parts.out_ranks_last
    tiles, wide = parts.tiles

    @T.prim_func
    def all_to_all_ll(
        x: T.Tensor(parts.shape(x_ranks_last), dtype),
        out: T.Tensor(parts.shape(out_ranks_last), dtype),
    ):
        with T.Kernel(outer * tiles * wide, threads=256) as block:
            arrived = W.alloc_symmetric((ranks, outer, parts.rows, width), dtype)
            me, (o, m, n) = W.rank(), parts.place_of(block)
            for step in T.serial(ranks):
                peer = (me + 1 + step) % ranks
                T.copy(
                    x[o, m : m + height, peer, n : n + columns]
                    if x_ranks_last
                    else x[o, peer, m : m + height, 0, n : n + columns],
                    arrived[peer, me, o, m : m + height, n : n + columns],
                )
            for step in T.serial(ranks):
                source = (me + ranks - step) % ranks
                T.copy(
                    arrived[me, source, o, m : m + height, n : n + columns],
                    out[o, m : m + height, source, n : n + columns]
                    if out_ranks_last
                    else out[o, source, m : m + height, 0, n : n + columns],
                )

    return with_ll_protocol(all_to_all_ll, "arrived")


class AllToAll(Collective, op=NAME):
    """All-to-all from one axis to another."""

    row = TableRow(
        inputs="any type",
        result="`x.shape[scatter_dim]` is divided by W, `x.shape[gather_dim]` multiplied by W: "
        "part `r` of each rank's `x` is sent to rank `r`, which concatenates the parts",
        gradient="the reverse `all_to_all`",
        memory="`ldst` 2, `ll` 4",
        sent="(W - 1) / W x S",
    )
    options = ("scatter_dim", "gather_dim")
    options_format = ", axes {} to {}"
    in_place = False
    ll_bytes = LL_BYTES

    @staticmethod
    def result(x, ranks, scatter_dim, gather_dim):
        require_exchangeable(NAME, x, 1)
        scatter = axis_of(NAME, "scatter_dim", scatter_dim, x)
        gather = axis_of(NAME, "gather_dim", gather_dim, x)
        shape = list(x.shape)
        shape[scatter] = extent_per_rank(NAME, x, scatter, ranks)
        shape[gather] *= ranks
        return tuple(shape), (scatter, gather)

    @staticmethod
    def steps(problem: CollectiveProblem, transport: str):
        if transport == "ll":
            return all_to_all_ll_program(Parts.of(problem, LL_TILE))
        return all_to_all_program(Parts.of(problem))

    @staticmethod
    def reference(x, out, group, *axes):
        nccl.all_to_all(x, out, group)

    @staticmethod
    def expected(inputs, rank, scatter, gather):
        return torch.cat([x.chunk(len(inputs), scatter)[rank] for x in inputs], gather)

    @staticmethod
    def copies(elements, ranks, dtype, *axes):
        @plan
        def all_to_all_copies(
            p: PlanBuilder,
            A: T.Tensor((ranks, elements), dtype),
            received: W.Symmetric((ranks, elements), dtype),
        ):
            for peer in p.peers():
                p.copy(received[peer, p.rank], A[peer], stream="copies")
            p.copy(received[p.rank, p.rank], A[p.rank])

        return all_to_all_copies

    @staticmethod
    def symmetric_inputs(problem):
        return 0, 2

    @staticmethod
    def unfused(x, out, group, scatter, gather):
        ranks = group.world_size
        sent = x.unflatten(scatter, (ranks, -1)).movedim(scatter, 0).contiguous()
        received = torch.empty_like(sent)
        AllToAll.reference(sent, received, group)
        out.unflatten(gather, (ranks, -1)).movedim(gather, 0).copy_(received)

    @staticmethod
    def within(problem: CollectiveProblem, ranks: TwoLevels):
        shape = list(problem.shape)
        shape[problem.options[0]] //= ranks.nodes.world_size
        return AllToAll, tuple(shape), problem.options

    @staticmethod
    def across(
        move: Move, x: torch.Tensor, out: torch.Tensor, mesh: Mesh, scatter: int, gather: int
    ) -> None:
        """Send the parts for another node to the rank with this rank's index there; within the
        node, exchange what has arrived while the rest is in flight."""
        parts = [part.contiguous() for part in x.chunk(mesh.nodes, scatter)]
        results = out.chunk(mesh.nodes, gather)
        for node, part in pieces_of_nodes(parts, mesh):
            move(AllToAll, part, results[node], scatter, gather)

    @staticmethod
    def gradient(grad, group, transport, scatter, gather):
        return torch.ops.tileweave.all_to_all(grad, gather, scatter, group, transport)


@brief_errors
def all_to_all(
    x: torch.Tensor,
    scatter_dim: int = 0,
    gather_dim: int = 0,
    group: Any = None,
    *,
    out: torch.Tensor | None = None,
    transport: str = "auto",
) -> torch.Tensor:
    """Scatter one axis over the ranks, and concatenate the received parts along another axis.

    An attention layer over a sharded sequence needs it (Ulysses): ``all_to_all(q, 1, 0)`` turns (S
    / ranks, heads, d) on each rank, all heads of a part of the sequence, into (S, heads / ranks,
    d), some heads of the whole sequence; ``all_to_all(o, 0, 1)`` is the inverse.

    Every rank calls it with the same shape; the first call with a new one compiles, collectively.

    Args:
        x: of any type.
        scatter_dim: the axis of which each rank receives a part; its extent is divided by the
            number of ranks.
        gather_dim: the axis along which the parts are concatenated in rank order; its extent is
            multiplied by the number of ranks.
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        out: contiguous, does not overlap ``x``; receives the result. Not differentiable.
        transport: ``ldst``, ``ll``, ``nccl`` (``torch.distributed``), or ``auto``; see
            ``transport_of``.

    Returns:
        The result, in the type of ``x``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return call_pair(NAME, (x,), group, out, transport, axes=(scatter_dim, gather_dim))
