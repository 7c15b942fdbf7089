"""Insert block barriers that TileLang omits in branches and after loops that may not run."""

from __future__ import annotations

from tvm import tirx

from ..ir.block_barrier import is_barrier, is_sync_threads, sync_threads
from ..ir.uniformity import Divergence, ThreadControl
from ..ir.walk import children_of, flatten, may_not_run, rewrite_children, statements_of
from ..ir.warp_roles import is_specialized


def sync_branches(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a block barrier on each path that bypasses a barrier that TileLang relies on.

    TileLang inserts barriers between accesses of shared memory as if both cases of a branch ran,
    one after the other, and every loop ran at least once. But a barrier in the first case does not
    order accesses of the second case, and a barrier in the second case does not order accesses of
    the first case with those after the branch. A warp group may then overwrite a tile that another
    one still multiplies, because tiles share memory.

    So the second case begins with a barrier if the first one has any, the first one ends with a
    barrier if the second one has any, and a barrier follows a loop that may run zero times.
    Branches on the thread index are not changed: the threads on each path have their own barriers.
    ``sync_around_branch`` orders them with other threads.

    If one case is specialized by warps, only the program's threads continue after the branch, and
    TileLang gives what follows barriers of these threads. All threads of the block execute the
    other case, so it ends with a barrier of the block.

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
        if may_not_run(stmt) and (barrier := barrier_in(stmt.body)) is not None:
            return flatten([stmt, barrier])
        return with_barriers(stmt) if isinstance(stmt, tirx.IfThenElse) else stmt

    def with_barriers(stmt: tirx.IfThenElse) -> tirx.Stmt:
        then_case, else_case = stmt.then_case, stmt.else_case
        first, second = barrier_in(then_case), barrier_in(else_case)
        if second is not None and not is_barrier(statements_of(then_case)[-1]):
            then_case = flatten([then_case, second])
        if first is not None and (else_case is None or not is_barrier(statements_of(else_case)[0])):
            else_case = first if else_case is None else flatten([first, else_case])
        then_case = _rejoined(then_case, stmt.else_case)
        else_case = _rejoined(else_case, stmt.then_case)
        if then_case is stmt.then_case and else_case is stmt.else_case:
            return stmt
        return tirx.IfThenElse(stmt.condition, then_case, else_case)

    def barrier_in(stmt: tirx.Stmt | None) -> tirx.Stmt | None:
        """Return a barrier inside ``stmt`` that all threads reaching ``stmt`` execute, or None."""
        if stmt is None or is_barrier(stmt):
            return stmt
        if control.enter(stmt) is Divergence.DIVERGENT:
            return None
        return next(filter(None, map(barrier_in, children_of(stmt))), None)

    return func.with_body(visit(func.body))


def _rejoined(case: tirx.Stmt | None, other_case: tirx.Stmt | None) -> tirx.Stmt | None:
    """Return ``case`` with a block barrier at its end if only ``other_case`` is specialized."""
    if case is None or not _has_specialized(other_case) or _has_specialized(case):
        return case
    if is_sync_threads(statements_of(case)[-1]):
        return case
    return flatten([case, sync_threads()])


def _has_specialized(stmt: tirx.Stmt | None) -> bool:
    """Return whether a part of ``stmt`` is specialized by warps."""
    if stmt is None or is_specialized(stmt):
        return stmt is not None
    return any(map(_has_specialized, children_of(stmt)))
