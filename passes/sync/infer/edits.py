"""Statements to put before and behind those of a kernel, all at once at the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tilelang.ir import get_stmt_span, set_stmt_span
from tvm import tirx

from ...ir.walk import flatten, rewrite_children
from ..regions.accesses import Access, Program
from ..regions.footprints import Footprints
from ..regions.space import Loop

_ALWAYS = np.ones((), np.bool_)


@dataclass
class Placement:
    """What to insert, and where."""

    before: dict[tirx.Stmt, list[tirx.Stmt]] = field(default_factory=dict)
    after: dict[tirx.Stmt, list[tirx.Stmt]] = field(default_factory=dict)
    head: list[tirx.Stmt] = field(default_factory=list)
    """At the start of the kernel."""
    tail: list[tirx.Stmt] = field(default_factory=list)
    """At its end."""

    def put_before(self, anchor: tirx.Stmt, stmt: tirx.Stmt, access: Access) -> None:
        """Before ``anchor``, with the source line of the access it is for."""
        self.before.setdefault(anchor, []).append(at_line_of(access.anchor, stmt))

    def put_after(self, anchor: tirx.Stmt, stmt: tirx.Stmt, access: Access) -> None:
        """Behind ``anchor``, likewise."""
        self.after.setdefault(anchor, []).append(at_line_of(access.anchor, stmt))

    def put_last(self, stmt: tirx.Stmt, access: Access) -> None:
        """At the end of the kernel, likewise."""
        self.tail.append(at_line_of(access.anchor, stmt))

    def applied(self, body: tirx.Stmt, program: Program) -> tirx.Stmt:
        """``body`` with everything put in."""

        def place(stmt: tirx.Stmt) -> tirx.Stmt:
            new = rewrite_children(stmt, place)
            around = [*self.before.get(stmt, ()), new, *self.after.get(stmt, ())]
            if program.body is not None and stmt.same_as(program.body):
                head = [at_line_of(program.kernel, s) for s in self.head]
                around = [*head, *around, *(at_line_of(program.kernel, s) for s in self.tail)]
            return flatten(around)

        return place(body)


def at_line_of(anchor: tirx.Stmt, stmt: tirx.Stmt) -> tirx.Stmt:
    """``stmt`` with the source line of the statement it is put in for, all through."""
    span = get_stmt_span(anchor)
    if span is None:
        return stmt

    def mark(inner: tirx.Stmt) -> tirx.Stmt:
        new = rewrite_children(inner, mark)
        if get_stmt_span(new) is None:
            set_stmt_span(new, span)
        return new

    return mark(stmt)


def loops_kept(
    access: Access, footprints: Footprints, values: list[np.ndarray], *, guarded: bool = False,
    clipped: bool = False,
) -> int:  # fmt: skip
    """How many of the loops around ``access`` a statement must stay in that uses ``values``: it may
    leave those in which neither they nor the conditions vary.

    Args:
        clipped: whether it may leave those, too, in which some rounds touch nothing, as behind the
            end of a tensor, if the first one does whenever any does.
        guarded: whether the statement asks, outside a loop that may have no round, whether there
            is one, and outside conditions, whether they hold. Then the rounds need not always be as
            many, and conditions may stand in the loop if the whole block takes one side.
    """
    kept = len(access.loops)
    sayable = guarded and footprints.is_certain and access.branches == len(access.conditions)
    while kept and access.around[kept - 1] is not None:
        inside = access.guards[kept - 1] == len(access.conditions)
        if not (inside or sayable) or any(varies(v, kept, footprints.mask) for v in values):
            break
        is_skipped = kept - 1 in footprints.skipped
        is_uneven = is_skipped or varies(footprints.mask, kept)
        may = guarded or (clipped and not is_skipped and not footprints.asked)
        if is_uneven and not (may and _in_first_round(footprints.mask, kept)):
            break
        kept -= 1
    return kept


def loops_shared(one: Access, other: Access) -> int:
    """How many loops stand around both accesses."""
    pairs = zip(one.loops, other.loops, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda p: p[0].var.same_as(p[1].var), pairs))


def moved(left: Sequence[Loop]) -> str:
    """That a statement has left these loops, for its reason."""
    if not left:
        return ""
    names = ", ".join(loop.var.name for loop in left)
    return f"; moved out of the loop{'s' if len(left) > 1 else ''} over {names}"


def anchor_of(access: Access, kept: int) -> tirx.Stmt:
    """The statement around ``access`` inside the first ``kept`` loops only."""
    stmt = access.around[kept] if kept < len(access.loops) else access.anchor
    assert stmt is not None
    return stmt


def _in_first_round(mask: np.ndarray, axis: int) -> bool:
    """Whether the mask holds in the first round of the loop of an axis if in any."""
    return bool(np.array_equal(mask.any(axis=axis), mask.take(0, axis=axis)))


def varies(values: np.ndarray, axis: int, mask: np.ndarray = _ALWAYS) -> bool:
    """Whether ``values`` differ along an axis from the first ones, where the mask holds."""
    values = np.asarray(values)
    if values.ndim <= axis or values.shape[axis] == 1:
        return False
    return bool(np.any((values != np.take(values, [0], axis=axis)) & mask))
