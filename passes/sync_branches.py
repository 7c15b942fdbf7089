"""No way through a branch or past a loop passes by a barrier of the block that stands in it."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from .walk import children_of, flatten, op_name, rewrite_children, variables_in


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
    return func.with_body(_Branches().visit(func.body))


class _Branches:
    """Follows which variables depend on the thread index."""

    def __init__(self) -> None:
        self._threads: set[tirx.Var] = set()

    def visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """``stmt`` with the barriers that are missing."""
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            if stmt.node.thread_tag.startswith("threadIdx"):
                self._threads.add(stmt.node.var)
        if isinstance(stmt, tirx.Bind) and self._differs(stmt.value):
            self._threads.add(stmt.var)
        stmt = rewrite_children(stmt, self.visit)
        if _may_not_run(stmt) and (barrier := self._barrier_in(stmt.body)) is not None:
            return flatten([stmt, barrier])
        if isinstance(stmt, tirx.IfThenElse) and not self._differs(stmt.condition):
            return self._met(stmt)
        return stmt

    def _met(self, stmt: tirx.IfThenElse) -> tirx.Stmt:
        then, other = stmt.then_case, stmt.else_case
        first, second = self._barrier_in(then), self._barrier_in(other)
        if second is not None and not _is_barrier(_statements(then)[-1]):
            then = flatten([then, second])
        if first is not None and (other is None or not _is_barrier(_statements(other)[0])):
            other = first if other is None else flatten([first, other])
        if then is stmt.then_case and other is stmt.else_case:
            return stmt
        return tirx.IfThenElse(stmt.condition, then, other)

    def _barrier_in(self, stmt: tirx.Stmt | None) -> tirx.Stmt | None:
        """One of the barriers in it that all threads meet who come here."""
        if stmt is None or _is_barrier(stmt):
            return stmt
        if isinstance(stmt, tirx.IfThenElse) and self._differs(stmt.condition):
            return None
        return next(filter(None, map(self._barrier_in, children_of(stmt))), None)

    def _differs(self, expr: tirx.PrimExpr) -> bool:
        return not self._threads.isdisjoint(variables_in(expr))


def _may_not_run(stmt: tirx.Stmt) -> bool:
    """Whether it is a loop that nobody can tell to run."""
    if isinstance(stmt, tirx.While):
        return True
    return isinstance(stmt, tirx.For) and not tvm.arith.Analyzer().can_prove(stmt.extent > 0)


def _is_barrier(stmt: tirx.Stmt) -> bool:
    """Whether it is a barrier of the block, or of a part of it."""
    if not isinstance(stmt, tirx.Evaluate) or op_name(stmt.value) != "tirx.tvm_storage_sync":
        return False
    return stmt.value.args[0].value.startswith("shared")


def _statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]
