"""Insert a block barrier between accesses of global memory and warp specialization."""

from __future__ import annotations

from tvm import tirx

from ...builtins.spec import builtin_of
from ..ir.block_barrier import is_sync_threads, sync_threads
from ..ir.walk import builtins_in, flatten, nodes_in, rewrite_children
from .keep_to_block import SCOPE


def sync_before_warps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Insert a block barrier before a specialized part if threads accessed global memory before it.

    With warp specialization, TileLang launches producer threads in addition to the program's.
    Before the specialized part, the program's threads are the first ones of the block. After it,
    they are the threads after the producers, and barriers there are barriers of these threads only.
    An earlier access of another thread would not be ordered before what the program's threads
    publish there, such as the end of the launch.

    Before: ``Y[tx] = S[tx]; T.attr([128, 128], "kWarpSpecializationScope", 0): ...``
    After:  ``Y[tx] = S[tx]; sync(); T.attr([128, 128], "kWarpSpecializationScope", 0): ...``
    """
    accessed = False

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        nonlocal accessed
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == SCOPE:
            if not accessed:
                return stmt
            accessed = False
            return flatten([sync_threads(), stmt])
        if is_sync_threads(stmt):
            accessed = False
            return stmt
        if isinstance(stmt, tirx.Evaluate | tirx.BufferStore | tirx.Bind):
            accessed = accessed or _accesses_global_memory(stmt)
            return stmt
        if isinstance(stmt, tirx.IfThenElse):
            return branch(stmt)
        return rewrite_children(stmt, visit)

    def branch(stmt: tirx.IfThenElse) -> tirx.Stmt:
        nonlocal accessed
        before, after = accessed, []

        def case(inner: tirx.Stmt) -> tirx.Stmt:
            nonlocal accessed
            accessed = before
            inner = visit(inner)
            after.append(accessed)
            return inner

        stmt = rewrite_children(stmt, case)
        accessed = any(after) or (stmt.else_case is None and before)
        return stmt

    return func.with_body(visit(func.body))


def _accesses_global_memory(stmt: tirx.Stmt) -> bool:
    """Return whether the threads of the block access global memory, other than by atomics."""
    accesses = nodes_in(stmt, tirx.BufferLoad, tirx.BufferStore)
    specs = map(builtin_of, builtins_in(stmt))
    return any(access.buffer.scope() == "global" for access in accesses) or any(
        spec.moves and spec.level != "leader" for spec in specs
    )
