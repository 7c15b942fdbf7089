"""Move the count of a launch after the block barrier before the producers' first load."""

from __future__ import annotations

from tvm import tirx

from ..ir.block_barrier import is_barrier
from ..ir.origin import COUNT, name_of
from ..ir.walk import builtins_in, flatten, rewrite_children, statements_of
from ..ir.warp_roles import is_specialized


def delay_launch_count(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the count of a launch after the block barrier that begins the specialized part.

    One thread counts. TileLang begins the specialized part with a barrier if loads precede it. All
    threads would wait there until the atomic operation has ended, before the producers load their
    first tile. After the barrier, only the counting thread waits.

    Before: ``if tx == 127: atom_add(launches[1], 1); tma_load(Q);
    T.attr([128, 128], "kWarpSpecializationScope", 0): sync(); if tx < 128: load; else: multiply``
    After:  ``tma_load(Q); T.attr([128, 128], "kWarpSpecializationScope", 0): sync();
    if tx == 127: atom_add(launches[1], 1); if tx < 128: load; else: multiply``
    """

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            stmts = list(stmt.seq)
            number = next((i for i, s in enumerate(stmts) if _counts(s)), len(stmts))
            moved = _with_count(stmts[number + 1 :], stmts[number]) if stmts[number:] else None
            if moved is not None:
                return flatten([*stmts[:number], *moved])
        return rewrite_children(stmt, visit)

    return func.with_body(visit(func.body))


def _with_count(stmts: list[tirx.Stmt], count: tirx.Stmt) -> list[tirx.Stmt] | None:
    """Return ``stmts`` with ``count`` in the specialized part, or None if that part does not begin
    with a barrier, or if other operations between blocks precede it."""
    for number, stmt in enumerate(stmts):
        if isinstance(stmt, tirx.AttrStmt):
            inner = statements_of(stmt.body)
            if not is_specialized(stmt):
                moved = _with_count(inner, count)
            else:
                moved = [inner[0], count, *inner[1:]] if is_barrier(inner[0]) else None
            if moved is not None:
                body = flatten(moved)
                new = rewrite_children(stmt, lambda _, body=body: body)
                return [*stmts[:number], new, *stmts[number + 1 :]]
        if builtins_in(stmt):
            return None
    return None


def _counts(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` only counts the launch, in one thread."""
    if not isinstance(stmt, tirx.IfThenElse):
        return False
    return {name_of(call) for call in builtins_in(stmt)} == {COUNT}
