"""Placement of statements before and after those of a kernel. All are inserted in one pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.spans import get_stmt_span, set_stmt_span
from ...ir.walk import flatten, location, rewrite_children, statements_of
from ..regions.accesses import Access, Program
from ..regions.footprints import Footprints
from ..regions.space import Loop

_ALWAYS = np.ones((), np.bool_)


@dataclass
class Placement:
    """Statements to insert.

    Attributes:
        before: statements before an anchor.
        after: statements after an anchor.
        head: statements at the start of the kernel.
        tail: statements at the end of the kernel.
    """

    before: dict[tirx.Stmt, list[tirx.Stmt]] = field(default_factory=dict)
    after: dict[tirx.Stmt, list[tirx.Stmt]] = field(default_factory=dict)
    head: list[tirx.Stmt] = field(default_factory=list)
    tail: list[tirx.Stmt] = field(default_factory=list)

    def put_before(self, anchor: tirx.Stmt, stmt: tirx.Stmt, access: Access) -> None:
        """Insert ``stmt`` before ``anchor``, with the source line of ``access``."""
        self.before.setdefault(anchor, []).append(at_line_of(access.anchor, stmt))

    def put_after(self, anchor: tirx.Stmt, stmt: tirx.Stmt, access: Access) -> None:
        """Insert ``stmt`` after ``anchor``, with the source line of ``access``."""
        self.after.setdefault(anchor, []).append(at_line_of(access.anchor, stmt))

    def put_last(self, stmt: tirx.Stmt, access: Access) -> None:
        """Insert ``stmt`` at the end of the kernel, with the source line of ``access``."""
        self.tail.append(at_line_of(access.anchor, stmt))

    def apply(self, body: tirx.Stmt, program: Program) -> tirx.Stmt:
        """Return ``body`` with all statements inserted.

        Raises:
            LanguageError: a loop would get statements that its explicit schedule does not count.
        """

        def insert(stmt: tirx.Stmt) -> tirx.Stmt:
            new = rewrite_children(stmt, insert)
            if isinstance(stmt, tirx.For) and "tl_pipeline_stage" in stmt.annotations:
                _require_same_count(stmt, new)
            stmts = [*self.before.get(stmt, ()), new, *self.after.get(stmt, ())]
            if program.body is not None and stmt.same_as(program.body):
                head = [at_line_of(program.kernel, s) for s in self.head]
                stmts = [*head, *stmts, *(at_line_of(program.kernel, s) for s in self.tail)]
            return flatten(stmts)

        return insert(body)


def _require_same_count(loop: tirx.For, new: tirx.For) -> None:
    if len(statements_of(new.body)) != len(statements_of(loop.body)):
        raise LanguageError(
            "T.Pipelined: order and stage count the statements of the loop, to which the compiler "
            f"adds signals or waits; expected num_stages alone{location(loop)}"
        )


def at_line_of(anchor: tirx.Stmt, stmt: tirx.Stmt) -> tirx.Stmt:
    """Give ``stmt`` and its children the source line of ``anchor``, unless they have one."""
    span = get_stmt_span(anchor)
    if span is None:
        return stmt

    def mark(inner: tirx.Stmt) -> tirx.Stmt:
        new = rewrite_children(inner, mark)
        if get_stmt_span(new) is None:
            set_stmt_span(new, span)
        return new

    return mark(stmt)


def enclosing_depth(
    access: Access, footprints: Footprints, values: list[np.ndarray], *, guarded: bool = False,
    clipped: bool = False,
) -> int:  # fmt: skip
    """Count the loops around ``access`` that must enclose a statement which uses ``values``. The
    statement may leave a loop if neither the values nor the conditions vary in it.

    Args:
        guarded: whether the caller guards the statement: outside a loop that may run zero times by
            its extent, and outside conditions by these conditions. Then the number of iterations
            may vary, and the loop may contain conditions that are uniform in the block.
        clipped: whether the statement may also leave a loop with iterations that access nothing,
            such as those after the end of a tensor. The first iteration must access something
            whenever any iteration does.
    """
    depth = len(access.loops)
    may_guard = guarded and footprints.is_certain and access.branches == len(access.conditions)
    while depth and (loop := access.enclosing[depth - 1]).stmt is not None:
        is_unguarded = loop.num_outer_conditions == len(access.conditions)
        if not (is_unguarded or may_guard) or any(
            varies(v, depth, footprints.mask) for v in values
        ):
            break
        is_skipped = depth - 1 in footprints.skipped
        is_uneven = is_skipped or varies(footprints.mask, depth)
        may_skip = guarded or (clipped and not is_skipped and not footprints.inner_conditions)
        if is_uneven and not (may_skip and _in_first_iteration(footprints.mask, depth)):
            break
        depth -= 1
    return depth


def loops_shared(first: Access, second: Access) -> int:
    """Count the loops that enclose both accesses."""
    pairs = zip(first.loops, second.loops, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda p: p[0].var.same_as(p[1].var), pairs))


def moved_out_of(exited: Sequence[Loop]) -> str:
    """Describe the loops that a statement was moved out of, as the end of its reason."""
    if not exited:
        return ""
    names = ", ".join(loop.var.name for loop in exited)
    return f"; moved out of the loop{'s' if len(exited) > 1 else ''} over {names}"


def anchor_of(access: Access, depth: int) -> tirx.Stmt:
    """Return the statement around ``access`` that is inside the outer ``depth`` loops only."""
    stmt = access.enclosing[depth].stmt if depth < len(access.enclosing) else access.anchor
    assert stmt is not None
    return stmt


def _in_first_iteration(mask: np.ndarray, axis: int) -> bool:
    """Return whether the mask holds in the first iteration of the loop of ``axis`` whenever it
    holds in any."""
    return bool(np.array_equal(mask.any(axis=axis), mask.take(0, axis=axis)))


def varies(values: np.ndarray, axis: int, mask: np.ndarray = _ALWAYS) -> bool:
    """Return whether ``values`` differ along ``axis`` from the first ones, where the mask holds."""
    values = np.asarray(values)
    if values.ndim <= axis or values.shape[axis] == 1:
        return False
    return bool(np.any((values != np.take(values, [0], axis=axis)) & mask))
