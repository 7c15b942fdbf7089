"""Copies that a plan makes beside the kernel, by copy engines: writes that the kernel waits for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from .accesses import Kind
from .boxes import Boxes

COPIES = "tileweave.copies"
"""Attribute of a program: the copies into its tensors, as JSON."""


@dataclass(frozen=True)
class Copy:
    """One copy.

    Attributes:
        rank, number: who makes it, and which of its copies it is.
        tensor: name of the program's parameter it goes to.
        start, extent: of the region, the rank first.
        line: ``file:line`` of the plan.
        before: whether the kernel of its rank starts after it.
    """

    rank: int
    number: int
    tensor: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    line: str
    before: bool


@dataclass(frozen=True, eq=False)
class Copies:
    """All copies of all ranks into one tensor, in place of an access of the kernel."""

    tensor: tirx.Buffer
    each: tuple[Copy, ...]
    kind: Kind = "write"
    op: str = "p.copy"

    @property
    def line(self) -> str:
        return self.each[0].line

    @property
    def location(self) -> str:
        return f"\n --> {self.line}"

    @property
    def text(self) -> str:
        return f"p.copy writes {self.tensor.name}"

    def boxes(self) -> Boxes:
        """Their regions: one axis of arrays, a copy each."""
        start = np.array([c.start for c in self.each]).T
        extent = np.array([c.extent for c in self.each]).T
        rank = np.array([c.rank for c in self.each])
        high = start + extent
        return Boxes(
            self, rank, start[0], tuple(start[1:]), tuple(high[1:]), np.ones(len(rank), np.bool_),
            np.zeros(len(rank), np.int64), 1, (None,) * (len(start) - 1),
        )  # fmt: skip


def with_copies(func: tirx.PrimFunc, copies: Sequence[Copy]) -> tirx.PrimFunc:
    """``func`` knowing that a plan copies into its tensors."""
    listed = [vars(c) for c in copies]
    return func.with_attr(COPIES, tirx.StringImm(json.dumps(listed)))


def copies_of(func: tirx.PrimFunc, tensor: tirx.Buffer) -> Copies | None:
    """The copies into ``tensor``, if there are any."""
    if not func.attrs or COPIES not in func.attrs:
        return None
    each = tuple(
        Copy(**{**fields, "start": tuple(fields["start"]), "extent": tuple(fields["extent"])})
        for fields in json.loads(func.attrs[COPIES].value)
        if fields["tensor"] == tensor.name
    )
    return Copies(tensor, each) if each else None
