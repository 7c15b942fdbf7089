"""Selection of cases by the options of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from ..builtins.errors import TileWeaveError
from ..ops.core.registry import operators_of
from ..runtime.host.group import from_torchrun
from . import attention, collectives, decode, gemm, moe
from .attention import Lengths
from .case import Case, Family
from .decode import Steps
from .moe_shapes import Mixtures

FAMILIES = gemm.FAMILY, collectives.FAMILY, attention.FAMILY, moe.FAMILY, decode.FAMILY
"""All operators that are timed. Without names and options those of the first family are."""


@dataclass(frozen=True)
class Wanted:
    """Options of the command line.

    Attributes:
        operators: names of operators. If empty: with ``sizes`` all collectives, with lengths
            attention, with tokens those of mixtures of experts, with keys that of decode steps,
            else all GEMM operators. ``Family.name`` is the name of all operators of a family.
        shapes: names of models, and ``MxNxK``; for GEMM operators.
        rows: values of M for each model.
        dtype: torch's name of the type.
        warmups, runs: numbers of uncounted and of counted runs.
        json, figure: files to write; None for none.
        command: name of the command, for errors; ``tune`` accepts GEMM operators only.
        sizes: a rank's input to a collective, in MiB; empty for ``collectives.SIZES``.
        attention, moe, decode: options of attention, of mixtures of experts and of decode steps.
    """

    operators: Sequence[str]
    shapes: Sequence[str]
    rows: Sequence[int]
    dtype: str = "bfloat16"
    warmups: int = 5
    runs: int = 20
    json: str | None = None
    figure: str | None = None
    command: str = "bench"
    sizes: Sequence[int] = ()
    attention: Lengths = field(default_factory=Lengths)
    moe: Mixtures = field(default_factory=Mixtures)
    decode: Steps = field(default_factory=Steps)

    @property
    def lengths(self) -> Sequence[int]:
        """Rows of each sequence, which select attention; empty for the default."""
        return self.attention.lengths

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens of each rank, which select mixtures of experts; empty for the default."""
        return self.moe.tokens

    @property
    def keys(self) -> Sequence[int]:
        """Tokens of each sequence, which select decode steps; empty for the default."""
        return self.decode.keys

    def cases(self) -> list[Case]:
        """Return the cases: operators by shape, collectives by size, attention by length.

        Raises:
            TileWeaveError: an operator does not exist.
        """
        families = FAMILIES if self.command == "bench" else FAMILIES[:1]
        operators = {
            name: (operator, family)
            for family in families
            for name, operator in operators_of(family.base).items()
        }
        groups = {family.name: names_of(family) for family in families if family.name}
        named = [name for group in self.operators for name in groups.get(group, [group])]
        for name in named:
            if name not in operators:
                legal = ", ".join([*operators, *groups])
                raise TileWeaveError(f"{self.command}: {name}; expected {legal}")
        implied = self._implied(named)
        names = named or implied or names_of(FAMILIES[0])
        return [
            case
            for operator, family in map(operators.__getitem__, names)
            for case in family.cases(operator, self, _world_size())
        ]

    def _implied(self, named: Sequence[str]) -> list[str]:
        """Return the operators whose option is given.

        Args:
            named: names of operators on the command line.

        Raises:
            TileWeaveError: only other operators are named.
        """
        implied: list[str] = []
        for family in FAMILIES[1:]:
            names, values = names_of(family), getattr(self, family.option)
            if values and named and not set(names) & set(named):
                values_text, expected = ",".join(map(str, values)), ", ".join(names)
                raise TileWeaveError(
                    f"bench: --{family.option} {values_text}; expected {expected} "
                    "by name, or no name"
                )
            implied += names if values else []
        return implied


def _world_size() -> int:
    """Return the number of ranks, also before they join a group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return from_torchrun("WORLD_SIZE", 1)


def names_of(family: Family) -> list[str]:
    """Return the names of the operators of a family."""
    return list(operators_of(family.base))
