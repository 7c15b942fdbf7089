"""Arguments of each collective, and its result on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tileweave.ops.collectives.collective import Collective
from tileweave.ops.core.registry import OPERATORS, operators_of

COMPOSED = [name for name, collective in operators_of(Collective).items() if collective.across]
"""Collectives that several nodes compute by calls within the nodes; the rest are
``torch.distributed``'s there."""


class Exchange(NamedTuple):
    """Arguments of a collective.

    Attributes:
        options: its axes, or the root.
        trailing: extents of the input after rows and columns.
    """

    options: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows, columns, *self.trailing


EXCHANGES = {
    **{name: Exchange() for name in operators_of(Collective)},
    "all_gather": Exchange((), (5,)),
    "reduce_scatter": Exchange((), (5,)),
    "all_reduce": Exchange((), (5,)),
    "all_to_all": Exchange((1, 0), (5,)),
    "all_to_all back": Exchange((0, 1), (5,)),
    "all_to_all in place": Exchange((0, 0), (5,)),
    "broadcast": Exchange((1,), (5,)),
    "ring_shift": Exchange((1,), (5,)),
}
"""Calls of all collectives. One without options needs no entry. The name is the first word."""


def exchange_by_one(x: list[torch.Tensor], what: str) -> list[torch.Tensor]:
    """Return the result of each rank, computed by one process from all inputs."""
    inputs, expected = torch.stack(x), OPERATORS[what.split()[0]].expected
    options = EXCHANGES[what].options
    return [expected(inputs, rank, *options).contiguous() for rank in range(len(x))]
