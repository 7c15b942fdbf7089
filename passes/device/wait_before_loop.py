"""Wait for loads before a loop that may have no iterations."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ..ir.walk import EXPECTS, MBARRIER_WAIT, flatten, op_name, rewrite_children, statements_of

_ELECT = "tl.tl_shuffle_elect"


def wait_before_loop(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move waits of the first iteration of a loop before the loop, if all blocks issue the loads.

    TileLang lets the first iteration wait for TMA loads that precede a loop. A block whose loop has
    no iterations would end, or reuse shared memory, while such a load is in flight.

    Before: ``if elect(256): expect(bar, 16384); tma_load(Q, bar); for k in range(n):
    if k == 0: mbarrier_wait_parity(bar, 0); ...``
    After:  ``if elect(256): expect(bar, 16384); tma_load(Q, bar); mbarrier_wait_parity(bar, 0);
    for k in range(n): ...``
    """

    def visit(stmt: tirx.Stmt, issued: list[tirx.PrimExpr]) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            known = list(issued)
            out = []
            for child in stmt.seq:
                out.append(visit(child, known))
                known += _barriers_of_loads(child)
            return flatten(out)
        if isinstance(stmt, tirx.For) and not isinstance(stmt.extent, tirx.IntImm):
            return flatten(_without_first_waits(stmt, issued))
        return rewrite_children(stmt, lambda s: visit(s, issued))

    return func.with_body(visit(func.body, []))


def _barriers_of_loads(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    """Return the barriers of loads that an elected thread of each block issues in ``stmt``."""
    if not isinstance(stmt, tirx.IfThenElse) or op_name(stmt.condition) != _ELECT:
        return []
    calls = [getattr(s, "value", None) for s in statements_of(stmt.then_case)]
    return [call.args[0] for call in calls if op_name(call) in EXPECTS]


def _without_first_waits(loop: tirx.For, issued: list[tirx.PrimExpr]) -> list[tirx.Stmt]:
    """Return the waits of the first iteration for ``issued`` barriers, and the other statements."""
    waits: list[tirx.Stmt] = []
    rest: list[tirx.Stmt] = []
    for stmt in statements_of(loop.body):
        inner = statements_of(stmt.then_case) if _is_first(stmt, loop) else []
        is_moved = bool(inner) and all(_waits_for(s, issued) for s in inner)
        waits += inner if is_moved else []
        rest += [] if is_moved else [stmt]
    body = flatten(rest)
    return [*waits, rewrite_children(loop, lambda _: body)] if waits else [loop]


def _is_first(stmt: tirx.Stmt, loop: tirx.For) -> bool:
    """Return whether ``stmt`` runs in the first iteration of ``loop`` only."""
    if not isinstance(stmt, tirx.IfThenElse) or stmt.else_case is not None:
        return False
    condition = stmt.condition
    return isinstance(condition, tirx.EQ) and (
        condition.a.same_as(loop.loop_var) and tvm.ir.structural_equal(condition.b, loop.min)
    )


def _waits_for(stmt: tirx.Stmt, issued: list[tirx.PrimExpr]) -> bool:
    call = getattr(stmt, "value", None)
    return op_name(call) == MBARRIER_WAIT and any(
        tvm.ir.structural_equal(call.args[0], barrier) for barrier in issued
    )
