"""Ring shift: every rank receives the input of the rank that is some steps before it."""

from typing import Any

import tilelang.language as T
import torch

from ...builtins import language as W
from ...builtins.errors import brief_errors
from ..core import nccl
from ..core.checks import refused
from ..core.collective_problem import CollectiveProblem, require_exchangeable
from ..core.library import call_pair
from ..core.registry import TableRow
from .collective import Collective
from .transport import LL_BYTES
from .vectors import LL_TILE, TiledView, with_ll_protocol, words_of

NAME = "ring_shift"


def ring_shift_program(view: TiledView, ranks: int, steps: int):
    """Return the program: each rank stores x (rows, columns) to the rank ``steps`` after it."""
    dtype = view.dtype

    @T.prim_func
    def ring_shift(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric(view.shape, dtype)
            tile_regs = T.alloc_fragment(view.tile, dtype)
            me, first = W.rank(), block * view.height
            T.copy(x[first, 0], tile_regs)
            T.copy(tile_regs, arrived[(me + steps) % ranks, first, 0])
            T.copy(arrived[me, first, 0], tile_regs)
            T.copy(tile_regs, out[first, 0])

    return ring_shift


def ring_shift_ll_program(view: TiledView, ranks: int, steps: int):
    """Return the program for small inputs: each rank stores x (rows, columns) as words with flags
    to the rank ``steps`` after it."""
    height, columns, dtype = view.height, view.columns, view.dtype

    @T.prim_func
    def ring_shift_ll(x: T.Tensor(view.shape, dtype), out: T.Tensor(view.shape, dtype)):
        with T.Kernel(view.tiles, threads=256) as block:
            arrived = W.alloc_symmetric(view.shape, dtype)
            me, m = W.rank(), block * height
            T.copy(
                x[m : m + height, 0:columns],
                arrived[(me + steps) % ranks, m : m + height, 0:columns],
            )
            T.copy(arrived[me, m : m + height, 0:columns], out[m : m + height, 0:columns])

    return with_ll_protocol(ring_shift_ll, "arrived")


class RingShift(Collective, op=NAME):
    """Shift of the inputs along the ring of ranks."""

    row = TableRow(
        inputs="any shape and type",
        result="the `x` of rank `r - steps`, modulo W, on rank `r`",
        gradient="`ring_shift` by `-steps`",
        sent="S",
        memory="`ldst` 1, `ll` 2",
    )
    options = ("steps",)
    options_format = ", by {} steps"
    ll_bytes = LL_BYTES

    @staticmethod
    def result(x, ranks, steps):
        require_exchangeable(NAME, x, 0)
        if isinstance(steps, bool) or not isinstance(steps, (int, torch.SymInt)):
            raise refused(NAME, f"steps={steps!r}", "an integer")
        return tuple(x.shape), (steps % ranks,)

    @staticmethod
    def steps(problem: CollectiveProblem, transport: str):
        dtype, count = words_of(problem.nbytes)
        (steps,) = problem.options
        if transport == "ll":
            view = TiledView.of(count, dtype, tile=LL_TILE)
            return ring_shift_ll_program(view, problem.ranks, steps)
        return ring_shift_program(TiledView.of(count, dtype), problem.ranks, steps)

    @staticmethod
    def reference(x, out, group, steps):
        ranks = range(group.world_size)
        sent = [int(rank == (group.rank + steps) % len(ranks)) for rank in ranks]
        received = [int(rank == (group.rank - steps) % len(ranks)) for rank in ranks]
        nccl.all_to_all_rows(x.reshape(1, -1), sent, out.view(1, -1), received, group)

    @staticmethod
    def expected(inputs, rank, steps):
        return inputs[(rank - steps) % len(inputs)]

    @staticmethod
    def sent_bytes(nbytes, ranks):
        return nbytes

    @staticmethod
    def symmetric_inputs(problem):
        return 0, 1

    @staticmethod
    def gradient(grad, group, transport, steps):
        return torch.ops.tileweave.ring_shift(grad, -steps, group, transport)


@brief_errors
def ring_shift(
    x: torch.Tensor,
    steps: int = 1,
    group: Any = None,
    *,
    out: torch.Tensor | None = None,
    transport: str = "auto",
) -> torch.Tensor:
    """Return the tensor of the rank that is ``steps`` before this one, in a ring of all ranks.

    Rank ``r`` sends ``x`` to rank ``r + steps`` and receives that of rank ``r - steps``, modulo the
    number of ranks. Pipelines of stages and ring algorithms need it. The gradient is shifted back.

    Every rank calls it with the same shape and steps; the first call with new ones compiles,
    collectively.

    Args:
        x: of any shape and type.
        steps: distance between sender and receiver; negative towards lower ranks.
        group: None for the default group, a ``ProcessGroup``, its name, or a ``DeviceMesh``
            with one axis; or with two, nodes and ranks of a node, in that order.
        out: of the same shape, contiguous; receives the result, and may be ``x``. Not
            differentiable.
        transport: ``ldst``, ``ll``, ``nccl`` (``torch.distributed``), or ``auto``; see
            ``transport_of``.

    Returns:
        The received tensor, in the shape and type of ``x``.

    Raises:
        TileWeaveError: arguments do not fit, or differ between ranks. Nothing is launched.
        HeapExhausted: the symmetric heap is too small.
    """
    return call_pair(NAME, (x,), group, out, transport, axes=(steps,))
