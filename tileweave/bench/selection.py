"""Selection of cases by the options of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..builtins.errors import TileWeaveError
from ..ops.core.registry import operators_of
from ..runtime.host.group import from_torchrun
from . import attention, collectives, decode, gemm, moe
from .case import Case, Family

FAMILIES = gemm.FAMILY, collectives.FAMILY, attention.FAMILY, moe.FAMILY, decode.FAMILY
"""All operators that are timed. Without names those of the first family are."""
DTYPE = torch.bfloat16
"""Type of the operands."""


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command line.

    Attributes:
        operators: names of operators, and of families for all their operators; empty for GEMM.
        shapes: what is fixed in the cases of a family, and
        sizes: what varies, as ``Family`` describes them; empty for the family's default.
        batches: numbers of sequences of attention and of decode steps; empty for the default.
        layout: distribution of the rows of attention.
        routings: how tokens choose experts.
        against: function to time beside an operator, which is called as the operator; None for
            none.
        runs, warmups: numbers of counted and of uncounted runs.
        json, figure: files to write; None for none.
        command: name of the command, for errors; ``tune`` accepts GEMM operators only.
    """

    operators: Sequence[str] = ()
    shapes: Sequence[str] = ()
    sizes: Sequence[int] = ()
    batches: Sequence[int] = ()
    layout: str = "zigzag"
    routings: Sequence[str] = ("uniform",)
    against: Callable[..., Any] | None = None
    runs: int = 20
    warmups: int = 5
    json: str | None = None
    figure: str | None = None
    command: str = "bench"

    def cases(self) -> list[Case]:
        """Return the cases of all operators.

        Raises:
            TileWeaveError: an operator or a shape does not exist.
        """
        families = FAMILIES if self.command == "bench" else FAMILIES[:1]
        operators = {
            name: (operator, family)
            for family in families
            for name, operator in operators_of(family.base).items()
        }
        groups = {family.name: names_of(family) for family in families}
        names = [
            name
            for group in self.operators or (FAMILIES[0].name,)
            for name in groups.get(group, [group])
        ]
        for name in names:
            if name not in operators:
                legal = ", ".join([*operators, *groups])
                raise TileWeaveError(f"{self.command}: {name}; expected {legal}")
        return [
            case
            for operator, family in map(operators.__getitem__, names)
            for case in family.cases(operator, self, _world_size())
        ]


def _world_size() -> int:
    """Return the number of ranks, also before they join a group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return from_torchrun("WORLD_SIZE", 1)


def names_of(family: Family) -> list[str]:
    """Return the names of the operators of a family."""
    return list(operators_of(family.base))
