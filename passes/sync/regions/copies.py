"""Copies that a plan makes beside the kernel, by copy engines: writes that the kernel waits for,
and reads that wait for the kernel."""

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
"""Attribute of a program: the copies into and out of its tensors, as JSON."""


@dataclass(frozen=True)
class Copy:
    """One side of a copy: what it writes, or what it reads.

    Attributes:
        rank, number: who makes it, and which of its copies it is.
        kind: ``write`` of where it goes to, ``read`` of where it comes from.
        tensor: name of the program's parameter.
        start, extent: of the region, the rank first.
        line: ``file:line`` of the plan.
        stream: in which it comes after those before it.
        before: whether the kernel of its rank starts after it.
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
    """All copies of all ranks into one tensor, or all out of it, in place of an access of the
    kernel."""

    tensor: tirx.Buffer
    kind: Kind
    each: tuple[Copy, ...]
    op: str = "p.copy"

    @property
    def line(self) -> str:
        return self.each[0].line

    @property
    def location(self) -> str:
        return f"\n --> {self.line}"

    @property
    def text(self) -> str:
        return f"p.copy {self.kind}s {self.tensor.name}"

    def footprints(self) -> Footprints:
        """Their regions: one axis of arrays, a copy each."""
        start = np.array([c.start for c in self.each]).T
        extent = np.array([c.extent for c in self.each]).T
        rank = np.array([c.rank for c in self.each])
        stands_for = cast(Access, self)  # who may meet copies asks first
        return Footprints(
            stands_for, rank, start[0], tuple(start[1:]), tuple(extent[1:]),
            np.ones(len(rank), np.bool_), np.zeros(len(rank), np.int64), 1,
        )  # fmt: skip


def with_copies(func: tirx.PrimFunc, copies: Sequence[Copy]) -> tirx.PrimFunc:
    """``func`` knowing what a plan copies into its tensors and out of them."""
    listed = [vars(c) for c in copies]
    return func.with_attr(COPIES, tirx.StringImm(json.dumps(listed)))


def copies_of(func: tirx.PrimFunc, tensor: tirx.Buffer) -> list[Copies]:
    """The copies into ``tensor``, if there are any, and those out of it."""
    if not func.attrs or COPIES not in func.attrs:
        return []
    each = [
        Copy(**{**fields, "start": tuple(fields["start"]), "extent": tuple(fields["extent"])})
        for fields in json.loads(func.attrs[COPIES].value)
        if fields["tensor"] == tensor.name
    ]
    kinds: tuple[Kind, ...] = ("write", "read")
    of_kind: dict[Kind, tuple[Copy, ...]]
    of_kind = {k: tuple(c for c in each if c.kind == k) for k in kinds}
    return [Copies(tensor, kind, some) for kind, some in of_kind.items() if some]
