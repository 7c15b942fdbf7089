"""Insert block barriers around a branch in which TileLang inserts barriers of its threads."""

from __future__ import annotations

from tvm import tirx

from ..ir.block_barrier import is_barrier, is_sync_threads, sync_threads
from ..ir.uniformity import Divergence, ThreadControl
from ..ir.walk import flatten, nodes_in, rewrite_children
from ..ir.warp_roles import roles_of


def sync_around_branch(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a block barrier before and after a branch on the thread index that has a barrier.

    Such a barrier is one of the threads that execute the branch. But when TileLang then looks for
    conflicts between the branch and other statements, it assumes that all threads of the block
    execute it. So nothing would order accesses of shared memory by the other threads before the
    accesses in the branch, or after them.

    Warp-specialized kernels are not changed: their branches are warps with other tasks.

    Before: ``(if tx < 64: for k in range(2): sync(3, 64); s[tx] = s[tx] * 2)``
    After:  ``sync(); (if tx < 64: for k in range(2): sync(3, 64); s[tx] = s[tx] * 2); sync()``
    """
    if roles_of(func) is not None:
        return func
    control = ThreadControl(func)

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.Bind):
            control.bind(stmt)
        divergence = control.enter(stmt)
        if divergence is Divergence.UNIFORM:
            return rewrite_children(stmt, visit)
        if divergence is Divergence.DIVERGENT and _has_partial_barrier(stmt):
            return flatten([sync_threads(), stmt, sync_threads()])
        return stmt

    return func.with_body(visit(func.body))


def _has_partial_barrier(stmt: tirx.Stmt) -> bool:
    return any(is_barrier(s) and not is_sync_threads(s) for s in nodes_in(stmt, tirx.Evaluate))
