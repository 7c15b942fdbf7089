"""Move the waits at the end of a launch from the consumer warps to the producer warps."""

from __future__ import annotations

from tvm import tirx

from ...builtins.spec import builtin_of
from ..ir.marks import without_marks
from ..ir.memory_order import writes
from ..ir.walk import (
    builtins_in,
    calls_in,
    flatten,
    has_effect,
    nodes_in,
    rewrite_children,
    variables_in,
)
from ..ir.warp_roles import is_specialized, roles_of


def move_final_waits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the waits at the end of the consumers' part to the producer.

    A wait that times out calls a function. In the consumers this call uses registers: wgmma is
    serialized, or register allocation fails. Only the end of the kernel follows these waits, so the
    producer, which has issued all loads, can execute them.

    A wait of a thread that the program selects by its index stays, because the producers have other
    indices.

    Before: ``if tx < 128: load; else: multiply; if block == last: wait_reached(...)``
    After:  ``if tx < 128: load; if block == last: wait_reached(...); else: multiply``
    """
    roles = roles_of(func)
    if roles is None:
        return func
    threads: set[tirx.Var] = set()

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
            if stmt.node.thread_tag.startswith("threadIdx"):
                threads.add(stmt.node.var)
        if is_specialized(stmt):
            return roles.rewrite_splits(stmt, move_waits)
        if isinstance(stmt, (tirx.For, tirx.While)):
            return stmt  # another iteration may follow
        if isinstance(stmt, tirx.SeqStmt):
            last = stmt.seq[-1]
            return rewrite_children(stmt, lambda s: visit(s) if s.same_as(last) else s)
        return rewrite_children(stmt, visit)

    def move_waits(stmt: tirx.IfThenElse) -> tirx.Stmt:
        stmts = list(stmt.else_case.seq) if isinstance(stmt.else_case, tirx.SeqStmt) else []
        fixed = {bind.var for inner in stmts for bind in nodes_in(inner, tirx.Bind)} | threads
        moved: list[tirx.Stmt] = []
        while stmts and _only_waits(stmts[-1]) and fixed.isdisjoint(_used_in(stmts[-1])):
            moved.insert(0, stmts.pop())
        if not moved:
            return stmt
        cases = iter([flatten([stmt.then_case, *moved]), flatten(stmts)])
        return rewrite_children(stmt, lambda _: next(cases))

    return func.with_body(visit(func.body))


def _only_waits(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` only waits."""
    return (
        bool(builtins_in(stmt))
        and not nodes_in(stmt, tirx.BufferStore)
        and all(_is_wait(call) for call in calls_in(stmt, has_effect))
    )


def _is_wait(call: tirx.Call) -> bool:
    spec = builtin_of(call)
    return spec is not None and bool(spec.waits) and not writes(call)


def _used_in(stmt: tirx.Stmt) -> list[tirx.Var]:
    return variables_in(without_marks(stmt))
