"""Copies that a plan runs on copy engines beside the kernel.

The kernel waits for the writes of copies; the reads of copies wait for the kernel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from tvm import tirx

from .accesses import Access, Kind
from .footprints import Footprints

COPIES = "tileweave.copies"
"""Attribute of a program that holds the copies into and out of its tensors, as JSON."""


@dataclass(frozen=True)
class Copy:
    """One side of a copy: the region that it writes, or the region that it reads.

    Attributes:
        rank, number: rank that makes the copy, and the number of the copy on that rank.
        kind: ``write`` for the destination, ``read`` for the source.
        tensor: name of the program's parameter.
        start, extent: the region; axis 0 is the rank axis.
        line: ``file:line`` of the plan.
        stream: stream that runs the copy, in order with its other copies.
        before: whether the kernel of the same rank starts after the copy.
    """

    rank: int
    number: int
    kind: Kind
    tensor: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    line: str
    stream: str | None
    before: bool


@dataclass(frozen=True, eq=False)
class Copies:
    """All copies of all ranks into one tensor, or out of it, used like an access of the kernel."""

    tensor: tirx.Buffer
    kind: Kind
    copies: tuple[Copy, ...]
    op: str = "p.copy"

    @property
    def line(self) -> str:
        return self.copies[0].line

    @property
    def location(self) -> str:
        return f"\n --> {self.line}"

    @property
    def text(self) -> str:
        return f"p.copy {self.kind}s {self.tensor.name}"

    def footprints(self) -> Footprints:
        """Return the regions as arrays of one axis, one element for each copy."""
        start = np.array([c.start for c in self.copies]).T
        extent = np.array([c.extent for c in self.copies]).T
        rank = np.array([c.rank for c in self.copies])
        # Callers test for ``Copies`` before they use what only an access of the kernel has.
        access = cast(Access, self)
        return Footprints(
            access, rank, start[0], tuple(start[1:]), tuple(extent[1:]),
            np.ones(len(rank), np.bool_), np.zeros(len(rank), np.int64), 1,
        )  # fmt: skip


def with_copies(func: tirx.PrimFunc, copies: Sequence[Copy]) -> tirx.PrimFunc:
    """Attach the copies of a plan into and out of the tensors of ``func`` to ``func``."""
    fields = [vars(c) for c in copies]
    return func.with_attr(COPIES, tirx.StringImm(json.dumps(fields)))


def copies_of(func: tirx.PrimFunc, tensor: tirx.Buffer) -> list[Copies]:
    """Return the copies into ``tensor`` and the copies out of it, each only if there are any."""
    if not func.attrs or COPIES not in func.attrs:
        return []
    tensor_copies = [
        Copy(**{**fields, "start": tuple(fields["start"]), "extent": tuple(fields["extent"])})
        for fields in json.loads(func.attrs[COPIES].value)
        if fields["tensor"] == tensor.name
    ]
    kinds: tuple[Kind, ...] = ("write", "read")
    of_kind = {k: tuple(c for c in tensor_copies if c.kind == k) for k in kinds}
    return [Copies(tensor, kind, copies) for kind, copies in of_kind.items() if copies]
