"""No way through a branch or past a loop passes by a barrier of the block that stands in it."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ..ir.block_barrier import is_barrier
from ..ir.uniformity import Divergence, ThreadControl
from ..ir.walk import children_of, flatten, rewrite_children, statements_of


def sync_branches(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let no way pass by a barrier on which TileLang counts behind it.

    TileLang puts barriers between accesses of shared memory as if both cases of a branch ran, one
    after the other, and every loop ran at least once. What a barrier in the first case orders is
    then not ordered for the second one, nor what the first one does for what follows a barrier in
    the second: a warp group may write a tile from which another still multiplies, as tiles share
    memory. So the second case begins with a barrier if the first one has any, the first one ends
    with a barrier if the second one has, and a loop that may not run at all is followed by one.

    What depends on the thread index is left alone: threads on either way have their own barriers.

    Before: ``if C: sync(); tile[i] = x  else: tile[i] = y; sync()``
    After:  ``if C: sync(); tile[i] = x; sync()  else: sync(); tile[i] = y; sync()``
    """
    control = ThreadControl(func)

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.Bind):
            control.bind(stmt)
        divergence = control.enter(stmt)
        stmt = rewrite_children(stmt, visit)
        if divergence is Divergence.DIVERGENT:
            return stmt
        if _may_not_run(stmt) and (barrier := barrier_in(stmt.body)) is not None:
            return flatten([stmt, barrier])
        return met(stmt) if isinstance(stmt, tirx.IfThenElse) else stmt

    def met(stmt: tirx.IfThenElse) -> tirx.Stmt:
        then, other = stmt.then_case, stmt.else_case
        first, second = barrier_in(then), barrier_in(other)
        if second is not None and not is_barrier(statements_of(then)[-1]):
            then = flatten([then, second])
        if first is not None and (other is None or not is_barrier(statements_of(other)[0])):
            other = first if other is None else flatten([first, other])
        if then is stmt.then_case and other is stmt.else_case:
            return stmt
        return tirx.IfThenElse(stmt.condition, then, other)

    def barrier_in(stmt: tirx.Stmt | None) -> tirx.Stmt | None:
        """One of the barriers in it that all threads meet who come here."""
        if stmt is None or is_barrier(stmt):
            return stmt
        if control.enter(stmt) is Divergence.DIVERGENT:
            return None
        return next(filter(None, map(barrier_in, children_of(stmt))), None)

    return func.with_body(visit(func.body))


def _may_not_run(stmt: tirx.Stmt) -> bool:
    """Whether it is a loop that nobody can tell to run."""
    if isinstance(stmt, tirx.While):
        return True
    return isinstance(stmt, tirx.For) and not tvm.arith.Analyzer().can_prove(stmt.extent > 0)
