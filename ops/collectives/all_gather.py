"""All-gather: every rank receives the inputs of all ranks.

Contains the tile program for SMs, the plan for copy engines with its kernel, and the torch operator
with its gradient.
"""

from typing import Any

import tilelang.language as T
import torch

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import Plan, PlanBuilder, plan
from ..core import nccl
from ..core.across_nodes import Mesh, pieces_of_nodes
from ..core.checks import shares_memory
from ..core.collective_problem import CollectiveProblem, require_exchangeable
from ..core.groups import TwoLevels
from ..core.library import call_pair
from ..core.registry import TableRow
from ..core.tiles import PersistentSchedule
from .collective import Collective, Move
from .transport import LL_BYTES, SUMMED
from .vectors import (
    COLLECT_BLOCKS,
    LL_TILE,
    TiledView,
    copies_to,
    locate_collected_tile,
    with_ll_protocol,
    words_of,
)

NAME = "all_gather"


@T.macro
def collect(tile_regs, arrived, out, me, first, ranks):
    """Copy a tile of each other rank's input to its position in ``out``, in order of arrival."""
    for step in T.serial(ranks - 1):
        source = (me + ranks - 1 - step) % ranks
        T.copy(arrived[me, source, first, 0], tile_regs)
        T.copy(tile_regs, out[source, first, 0])


def all_gather_program(view: TiledView, ranks: int):
    """Return the program for SMs: each rank stores x (rows, columns) to all others, which copy it
    to out (ranks, rows, columns)."""
    dtype = view.dtype

    @T.prim_func
    def all_gather(x: T.Tensor(view.shape, dtype), out: T.Tensor((ranks, *view.shape), dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric((ranks, *view.shape), dtype)
            tile_regs = T.alloc_fragment(view.tile, dtype)
            me, first = W.rank(), block * view.height
            T.copy(x[first, 0], tile_regs)
            for step in T.serial(ranks - 1):
                T.copy(tile_regs, arrived[(me + 1 + step) % ranks, me, first, 0])
            T.copy(tile_regs, out[me, first, 0])
            collect(tile_regs, arrived, out, me, first, ranks)

    return all_gather


def all_gather_ll_program(view: TiledView, ranks: int):
    """Return the program for small inputs: each rank stores x (rows, columns) as words with flags
    to all, itself included, which copy them to out (ranks, rows, columns)."""
    height, columns, dtype = view.height, view.columns, view.dtype

    @T.prim_func
    def all_gather_ll(x: T.Tensor(view.shape, dtype), out: T.Tensor((ranks, *view.shape), dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric((ranks, *view.shape), dtype)
            me, m = W.rank(), block * height
            for step in T.serial(ranks):
                T.copy(
                    x[m : m + height, 0:columns],
                    arrived[(me + 1 + step) % ranks, me, m : m + height, 0:columns],
                )
            for step in T.serial(ranks):
                source = (me + ranks - step) % ranks
                T.copy(
                    arrived[me, source, m : m + height, 0:columns],
                    out[source, m : m + height, 0:columns],
                )

    return with_ll_protocol(all_gather_ll, "arrived")


def collect_shares(view: TiledView, ranks: int, blocks: int | None = None):
    """Return the kernel that copies the own input and the tiles that copy engines write to their
    positions in ``out``, tile by tile, in the order in which the ranks' inputs arrive.

    Args:
        blocks: number of blocks that share the tiles; None for one block per tile.
    """
    dtype, schedule = view.dtype, PersistentSchedule.with_blocks(ranks * view.tiles, blocks)

    @T.prim_func
    def collect_shares(
        x: T.Tensor(view.shape, dtype),
        arrived: W.Symmetric((ranks, *view.shape), dtype),
        out: T.Tensor((ranks, *view.shape), dtype),
    ):
        with T.Kernel(schedule.blocks, threads=256) as block:
            tile_regs = T.alloc_fragment(view.tile, dtype)
            me = W.rank()
            for wave in T.serial(schedule.waves):
                number = wave * schedule.blocks + block
                if number < schedule.tiles:
                    before, source, tile = locate_collected_tile(number, me, view.tiles, ranks)
                    first = tile * view.height
                    if before == 0:
                        T.copy(x[first, 0], tile_regs)
                    else:
                        T.copy(arrived[me, source, first, 0], tile_regs)
                    T.copy(tile_regs, out[source, first, 0])

    return collect_shares


def all_gather_plan(
    view: TiledView, ranks: int, chunks: list[slice], blocks: int | None = None
) -> Plan:
    """Return the plan for copy engines: they copy x (rows, columns) to all others, to the last peer
    in chunks. A kernel of ``blocks`` blocks copies what has arrived to out (ranks, rows, columns)
    while the rest is in flight."""
    kernel, dtype = collect_shares(view, ranks, blocks), view.dtype

    @plan
    def all_gather(
        p: PlanBuilder,
        x: T.Tensor(view.shape, dtype),
        arrived: W.Symmetric((ranks, *view.shape), dtype),
        out: T.Tensor((ranks, *view.shape), dtype),
    ):
        for peer, chunk in copies_to(p.peers(), chunks):
            p.copy(arrived[peer, p.rank, chunk], x[chunk], stream="copies")
        p.launch(kernel, x, arrived, out)

    return all_gather


class AllGather(Collective, op=NAME):
    """All-gather along the first axis."""

    row = TableRow(
        inputs="(N, ...), any type",
        result="the `x` of all ranks, (W x N, ...)",
        gradient="`reduce_scatter` by the same transport, `auto` for `ll`; for types that it does "
        "not add `nccl`",
        memory="`copy_engine` W; `ldst` 2 W; `ll` 4 W",
        sent="(W - 1) x S",
    )
    copy_engine_min_ranks = 3
    ll_bytes = LL_BYTES

    @staticmethod
    def result(x, ranks):
        require_exchangeable(NAME, x, 1)
        return (x.shape[0] * ranks, *x.shape[1:]), ()

    @staticmethod
    def steps(problem: CollectiveProblem, transport: str):
        dtype, count = words_of(problem.nbytes)
        if transport == "ll":
            return all_gather_ll_program(TiledView.of(count, dtype, tile=LL_TILE), problem.ranks)
        view = TiledView.of(count, dtype)
        if transport != "copy_engine":
            return all_gather_program(view, problem.ranks)
        return all_gather_plan(view, problem.ranks, view.chunks(), COLLECT_BLOCKS)

    @staticmethod
    def reference(x, out, group):
        nccl.all_gather_into(x, out, group)

    @staticmethod
    def expected(inputs, rank):
        return inputs.flatten(0, 1)

    @staticmethod
    def copies(elements, ranks, dtype):
        @plan
        def all_gather_copies(
            p: PlanBuilder,
            A: T.Tensor((elements,), dtype),
            received: W.Symmetric((ranks, elements), dtype),
        ):
            for peer in p.peers():
                p.copy(received[peer, p.rank], A, stream="copies")
            p.copy(received[p.rank, p.rank], A)

        return all_gather_copies

    @staticmethod
    def sent_bytes(nbytes, ranks):
        return nbytes * (ranks - 1)

    @staticmethod
    def symmetric_inputs(problem):
        return problem.ranks, 2 * problem.ranks

    @staticmethod
    def within(problem: CollectiveProblem, ranks: TwoLevels):
        return AllGather, problem.shape, ()

    @staticmethod
    def across(move: Move, x: torch.Tensor, out: torch.Tensor, mesh: Mesh) -> None:
        """Send the input to the other nodes, and gather within the node what has arrived while the
        rest is in flight."""
        if shares_memory(x, out):  # out is written while x is sent
            x = x.clone()
        parts = out.unflatten(0, (mesh.nodes, -1))
        for node, part in pieces_of_nodes([x] * mesh.nodes, mesh):
            move(AllGather, part, parts[node])

    @staticmethod
    def gradient(grad, group, transport):
        sum_transport = "auto" if transport == "ll" else transport
        sum_transport = sum_transport if grad.dtype in SUMMED else "nccl"
        return torch.ops.tileweave.reduce_scatter(grad, group, sum_transport)


@brief_errors
def all_gather(
    x: torch.Tensor, group: Any = None, *, out: torch.Tensor | None = None, transport: str = "auto"
) -> torch.Tensor:
    """Concatenate the inputs of all ranks along the first axis, in rank order.

    Every rank calls it with the same shape; the first call with a new one compiles, collectively.

    Args:
        x: (N, ...), of any type.
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        out: (ranks * N, ...), contiguous; receives the result. ``x`` may be this rank's part of it.
            Not differentiable.
        transport: ``copy_engine``, ``ldst``, ``ll``, ``nccl`` (``torch.distributed``), or
            ``auto``; see ``transport_of``.

    Returns:
        (ranks * N, ...), in the type of ``x``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return call_pair(NAME, (x,), group, out, transport)
