"""Broadcast: every rank receives the input of one rank, the root.

Contains the tile program and the torch operator with its gradient.
"""

from typing import Any

import tilelang.language as T
import torch
from torch.nn.functional import pad

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ...runtime import PlanBuilder, plan
from ..core import nccl
from ..core.across_nodes import Mesh
from ..core.checks import refused
from ..core.collective_problem import CollectiveProblem, require_exchangeable
from ..core.groups import TwoLevels, ranks_of
from ..core.library import call_pair
from ..core.registry import TableRow
from .all_gather import AllGather
from .collective import Collective, Move
from .transport import ROW_BYTES
from .vectors import TiledView, words_of

NAME = "broadcast"


def broadcast_program(view: TiledView, ranks: int, root: int):
    """Return the tile program: the root stores each tile of x (rows, columns) to one other rank,
    its relay, which stores it to the rest.

    The other ranks are relays of equally many tiles, so the root sends x once, and no rank sends
    more.
    """
    dtype = view.dtype
    relays = max(ranks - 1, 1)

    @T.prim_func
    def broadcast(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric(view.shape, dtype)
            tile_regs = T.alloc_fragment(view.tile, dtype)
            me, first = W.rank(), block * view.height
            relay = (root + 1 + block % relays) % ranks
            if me == root:
                T.copy(x[first, 0], tile_regs)
                if ranks > 1:
                    T.copy(tile_regs, arrived[relay, first, 0])
            else:
                T.copy(arrived[me, first, 0], tile_regs)
                if me == relay:
                    for step in T.serial(ranks - 1):
                        peer = (me + 1 + step) % ranks
                        if peer != root:
                            T.copy(tile_regs, arrived[peer, first, 0])
            T.copy(tile_regs, out[first, 0])

    return broadcast


class Broadcast(Collective, op=NAME):
    """Broadcast from one rank."""

    row = TableRow(
        inputs="any shape and type; only that of rank `root` is read",
        result="the `x` of rank `root`. It stores each tile to one other rank, which stores it to "
        "the rest",
        gradient="the sum over ranks for the root's `x`, by `all_reduce`; zero for the others",
        sent="S",
        memory="1",
    )
    options = ("root",)
    options_format = ", from rank {}"
    reference_in_place = True

    @staticmethod
    def result(x, ranks, root):
        require_exchangeable(NAME, x, 0)
        if not isinstance(root, (int, torch.SymInt)) or not 0 <= root < ranks:
            raise refused(NAME, f"root={root!r}", f"a rank from 0 to {ranks - 1}")
        return tuple(x.shape), (root,)

    @staticmethod
    def steps(problem: CollectiveProblem, transport: str):
        dtype, count = words_of(problem.nbytes)
        view, (root,) = TiledView.of(count, dtype), problem.options
        return broadcast_program(view, problem.ranks, root)

    @staticmethod
    def reference(x, out, group, root):
        nccl.broadcast(out, root, group)

    @staticmethod
    def expected(inputs, rank, root):
        return inputs[root]

    @staticmethod
    def copies(elements, ranks, dtype, root):
        @plan
        def broadcast_copies(
            p: PlanBuilder,
            A: T.Tensor((ranks, elements), dtype),
            received: W.Symmetric((ranks, elements), dtype),
        ):
            if p.rank == root:
                for peer in p.peers():
                    p.copy(received[peer], A, stream="copies")
                p.copy(received[root], A)

        return broadcast_copies

    @staticmethod
    def sent_bytes(nbytes, ranks):
        return nbytes

    @staticmethod
    def symmetric_inputs(problem):
        return 0, 1

    @staticmethod
    def within(problem: CollectiveProblem, ranks: TwoLevels):
        (root,) = problem.options
        return Broadcast, problem.shape, (root % ranks.node.world_size,)

    @staticmethod
    def across(move: Move, x: torch.Tensor, out: torch.Tensor, mesh: Mesh, root: int) -> None:
        """Broadcast within the root's node. Its ranks send one part each to the other nodes, which
        gather the parts."""
        node, local = divmod(root, mesh.ranks_per_node)
        if mesh.node == node:
            move(Broadcast, x, out, local)
        flat = out.view(-1).view(torch.uint8)
        padding = -flat.numel() % (mesh.ranks_per_node * ROW_BYTES)
        whole = pad(flat, (0, padding)) if padding else flat
        part = whole.chunk(mesh.ranks_per_node)[mesh.local].clone()
        mesh.broadcast(part, node)
        if mesh.node != node:
            move(AllGather, part, whole)
            if padding:
                flat.copy_(whole[: flat.numel()])

    @staticmethod
    def gradient(grad, group, transport, root):
        sum_transport = "nccl" if transport == "nccl" else "auto"
        total = torch.ops.tileweave.all_reduce(grad, group, sum_transport)
        return total if ranks_of(group).rank == root else torch.zeros_like(total)


@brief_errors
def broadcast(
    x: torch.Tensor,
    root: int = 0,
    group: Any = None,
    *,
    out: torch.Tensor | None = None,
    transport: str = "auto",
) -> torch.Tensor:
    """Return the tensor of one rank on every rank.

    The gradient of the root's ``x`` is the sum of the gradients of all results. That of the others
    is zero.

    Every rank calls it with the same shape and root; the first call with new ones compiles,
    collectively.

    Args:
        x: of any shape and type; its values matter on the root only.
        root: rank of the root in the group.
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        out: of the same shape, contiguous; receives the result, and may be ``x``. Not
            differentiable.
        transport: ``ldst``, ``nccl`` (``torch.distributed``), or ``auto``; see ``transport_of``.

    Returns:
        The root's tensor, in the shape and type of ``x``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return call_pair(NAME, (x,), group, out, transport, axes=(root,))
