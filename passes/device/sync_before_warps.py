"""Insert a block barrier between accesses of producer threads and what other threads publish."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.spec import builtin_of
from ..ir.block_barrier import is_barrier, is_sync_threads, sync_threads
from ..ir.memory_order import releases
from ..ir.walk import (
    builtins_in,
    calls_in,
    flatten,
    headers_of,
    is_leaf,
    may_not_run,
    nodes_in,
    op_name,
    rewrite_children,
    statements_of,
    variables_in,
)
from ..ir.warp_roles import WarpRoles, is_specialized, roles_of

_ACCESSES = tirx.BufferLoad, tirx.BufferStore
_ARRIVE = "tirx.ptx_arrive_barrier"
"""Arrival at a barrier of the consumers: the thread's accesses before it are ordered."""


def sync_before_warps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a block barrier before a part of the kernel in which only the program's threads
    synchronize, if other threads have accessed global memory before it.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, the program's threads are the first ones of the block. In it and
    after it, they are the threads after the producers, and barriers there are barriers of these
    threads only. An access of another thread would not be ordered before what the program's threads
    publish there, such as the end of the launch.

    The other threads access global memory before the specialized part, but also in it: a producer
    reads how many rows of a ragged tensor it must wait for, or the bound of its loop. A late wait
    for a flag that the kernel clears would not end. If the consumers already publish in the
    specialized part, a barrier of both follows the producers' code.

    Before: ``Y[tx] = S[tx]; T.attr([128, 128], "kWarpSpecializationScope", 0): if tx < 128: n =
    S[0]; load; else: multiply; if 128 <= tx: sync(3, 128); signal``
    After:  ``Y[tx] = S[tx]; sync(); T.attr([128, 128], "kWarpSpecializationScope", 0): if tx < 128:
    n = S[0]; load; else: multiply; sync(); if 128 <= tx: sync(3, 128); signal``
    """
    roles = roles_of(func)
    if roles is None:
        return func
    stored = {s.buffer.data for s in nodes_in(func.body, tirx.BufferStore)}
    return func.with_body(_Inserter(roles, stored).visit(func.body))


class _Inserter:
    """Inserts the barriers, statement by statement.

    Args:
        stored: variables of the buffers that the kernel stores to. A flag among them is cleared.
    """

    def __init__(self, roles: WarpRoles, stored: set[tirx.Var]) -> None:
        self.roles, self.stored = roles, stored
        self.accessed = False
        """True if other threads accessed global memory since the last barrier of the block."""

    def visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if is_specialized(stmt):
            missing = self.accessed and not is_sync_threads(statements_of(stmt.body)[0])
            self.accessed = False
            stmt = rewrite_children(stmt, self.visit)
            return flatten([sync_threads(), stmt]) if missing else stmt
        if isinstance(stmt, tirx.For | tirx.While):
            return self._loop(stmt)
        if isinstance(stmt, tirx.IfThenElse):
            return self._branch(stmt)
        if is_sync_threads(stmt) or op_name(getattr(stmt, "value", None)) == _ARRIVE:
            self.accessed = False
        elif is_leaf(stmt):
            self.accessed = self.accessed or self._accesses_global_memory(stmt)
        return rewrite_children(stmt, self.visit)

    def _loop(self, stmt: tirx.For | tirx.While) -> tirx.Stmt:
        """Visit a loop. One barrier before it serves all iterations, unless other threads access
        global memory in it, too."""
        before, new = self.accessed, self._iterate(stmt, False)
        if not before and not self.accessed:
            return new
        accesses, in_each = self.accessed, self._iterate(stmt, True)
        if not accesses and not tvm.ir.structural_equal(new, in_each):
            self.accessed = False
            return flatten([sync_threads(), new])
        self.accessed = self.accessed or (before and may_not_run(stmt))
        return in_each

    def _iterate(self, stmt: tirx.For | tirx.While, accessed: bool) -> tirx.Stmt:
        """Visit an iteration. The bound of a loop is read before and after it.

        Args:
            accessed: whether other threads accessed global memory before.
        """
        reads = any(map(self._accesses_global_memory, headers_of(stmt)))
        self.accessed = accessed or reads
        stmt = rewrite_children(stmt, self.visit)
        self.accessed = self.accessed or reads
        return stmt

    def _branch(self, stmt: tirx.IfThenElse) -> tirx.Stmt:
        if self.roles.is_of_consumers(stmt.condition) and stmt.else_case is None:
            missing = self.accessed and any(map(is_barrier, nodes_in(stmt, tirx.Evaluate)))
            self.accessed = self.accessed and not missing
            return flatten([sync_threads(), stmt]) if missing else stmt
        before, after = self.accessed or self._accesses_global_memory(stmt.condition), []

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            self.accessed = before
            inner = self.visit(inner)
            after.append(self.accessed)
            return inner

        if self.roles.is_of_consumers(tirx.Not(stmt.condition)):
            cases = iter(self._joined(case(stmt.then_case), stmt.else_case))
            return rewrite_children(stmt, lambda _: next(cases))
        stmt = rewrite_children(stmt, case)
        self.accessed = any(after) or (stmt.else_case is None and before)
        return stmt

    def _joined(
        self, producers: tirx.Stmt, consumers: tirx.Stmt | None
    ) -> tuple[tirx.Stmt, tirx.Stmt | None]:
        """Return the parts of producers and consumers, with a barrier of both before the consumers
        publish, if it is necessary. Producers never wait for what consumers do after it."""
        stmts = [] if consumers is None else statements_of(consumers)
        awaited = [i for i, s in enumerate(stmts) if calls_in(s, lambda c: op_name(c) == _ARRIVE)]
        after = range(awaited[-1] + 1 if awaited else 0, len(stmts))
        first = next((i for i in after if any(map(releases, builtins_in(stmts[i])))), None)
        if first is None or not self.accessed:
            return producers, consumers
        self.accessed = False
        before = stmts[: first - 1 if first and is_barrier(stmts[first - 1]) else first]
        consumers = flatten([*before, sync_threads(), *stmts[first:]])
        return flatten([producers, sync_threads()]), consumers

    def _accesses_global_memory(self, node: tirx.Stmt | tirx.PrimExpr) -> bool:
        """Return whether the threads of the block access global memory, other than by atomics, or
        wait for a flag that the kernel clears."""
        if any(a.buffer.scope() == "global" for a in nodes_in(node, *_ACCESSES)):
            return True
        calls = [(builtin_of(call), call) for call in builtins_in(node)]
        return any(spec.moves and spec.level != "leader" for spec, _ in calls) or any(
            spec.waits and self.stored.intersection(variables_in(call)) for spec, call in calls
        )
