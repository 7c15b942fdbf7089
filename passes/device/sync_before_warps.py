"""Insert a block barrier between accesses of producer threads and what other threads publish."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.spec import builtin_of
from ..ir.block_barrier import is_barrier, is_sync_threads, sync_threads
from ..ir.walk import builtins_in, flatten, nodes_in, op_name, rewrite_children
from .keep_to_block import SCOPE
from .sync_branches import may_not_run

_ARRIVE = "tirx.ptx_arrive_barrier"
"""Arrival at a barrier of the consumers: the thread's accesses before it are ordered."""


def sync_before_warps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a block barrier before a part of the kernel in which barriers are of the program's
    threads only, if other threads have accessed global memory before it.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, the program's threads are the first ones of the block. In it and
    after it, they are the threads after the producers, and barriers there are barriers of these
    threads only. An access of another thread would not be ordered before what the program's threads
    publish there, such as the end of the launch.

    The other threads access global memory before the specialized part, but also in it: a producer
    reads how many rows of a ragged tensor it must wait for.

    Before: ``Y[tx] = S[tx]; T.attr([128, 128], "kWarpSpecializationScope", 0): if tx < 128: n =
    S[0]; load; else: multiply; if 128 <= tx: sync(3, 128); signal``
    After:  ``Y[tx] = S[tx]; sync(); T.attr([128, 128], "kWarpSpecializationScope", 0): if tx < 128:
    n = S[0]; load; else: multiply; sync(); if 128 <= tx: sync(3, 128); signal``
    """
    scopes = [a for a in nodes_in(func.body, tirx.AttrStmt) if a.attr_key == SCOPE]
    if not scopes:
        return func
    producers = int(scopes[0].node[0])
    analyzer = tvm.arith.Analyzer()
    thread: list[tirx.Var] = []
    accessed = False  # whether other threads did so since the last barrier of the block

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        nonlocal accessed
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            analyzer.bind(stmt.node.var, tvm.ir.Range(0, stmt.value))
            if stmt.node.thread_tag == "threadIdx.x":
                thread[:] = [stmt.node.var]
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == SCOPE:
            missing, accessed = accessed, False
            stmt = rewrite_children(stmt, visit)
            return flatten([sync_threads(), stmt]) if missing else stmt
        if isinstance(stmt, tirx.For | tirx.While):
            return loop(stmt)
        if isinstance(stmt, tirx.IfThenElse):
            return branch(stmt)
        if is_sync_threads(stmt) or op_name(getattr(stmt, "value", None)) == _ARRIVE:
            accessed = False
        elif isinstance(stmt, tirx.Evaluate | tirx.BufferStore | tirx.Bind):
            accessed = accessed or _accesses_global_memory(stmt)
        return rewrite_children(stmt, visit)

    def loop(stmt: tirx.For | tirx.While) -> tirx.Stmt:
        nonlocal accessed
        before = accessed
        new = rewrite_children(stmt, visit)
        if accessed and not before:  # the next iteration begins after these accesses
            new = rewrite_children(stmt, visit)
        accessed = accessed or (before and may_not_run(stmt))
        return new

    def branch(stmt: tirx.IfThenElse) -> tirx.Stmt:
        nonlocal accessed
        if is_of_program(stmt.condition) and stmt.else_case is None:
            missing = accessed and any(map(is_barrier, nodes_in(stmt, tirx.Evaluate)))
            accessed = accessed and not missing
            return flatten([sync_threads(), stmt]) if missing else stmt
        before, after = accessed, []

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            nonlocal accessed
            accessed = before
            inner = visit(inner)
            after.append(accessed)
            return inner

        if is_of_program(tirx.Not(stmt.condition)):
            cases = iter([case(stmt.then_case), stmt.else_case])
            return rewrite_children(stmt, lambda _: next(cases))
        stmt = rewrite_children(stmt, case)
        accessed = any(after) or (stmt.else_case is None and before)
        return stmt

    def is_of_program(condition: tirx.PrimExpr) -> bool:
        """Return whether only threads after the producers fulfill the condition."""
        with analyzer.constraint_scope(condition):
            return bool(thread) and analyzer.can_prove(thread[0] >= producers)

    return func.with_body(visit(func.body))


def _accesses_global_memory(stmt: tirx.Stmt) -> bool:
    """Return whether the threads of the block access global memory, other than by atomics."""
    accesses = nodes_in(stmt, tirx.BufferLoad, tirx.BufferStore)
    specs = map(builtin_of, builtins_in(stmt))
    return any(access.buffer.scope() == "global" for access in accesses) or any(
        spec.moves and spec.level != "leader" for spec in specs
    )
