"""Execute a conditional load, and count its bytes, only if its condition holds."""

from __future__ import annotations

import itertools

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.operators import ONLY_IF
from ..ir.walk import EXPECTS, calls_in, flatten, op_name, rewrite_children, uses_op


def guard_loads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Move the conditions that ``predicate_loads`` put into indices around the lowered copies.

    The barrier of a TMA load that is not executed expects no bytes. The producer still arrives, so
    that the phases of the barrier advance.

    Before: ``mbarrier_expect_tx(bar, 16384); tma_load(A, bar, tile, only_if(mine, k), m)``
    After:  ``mbarrier_expect_tx(bar, mine ? 16384 : 0); if mine: tma_load(A, bar, tile, k, m)``
    """
    if not uses_op(func.body, ONLY_IF):
        return func

    def visit(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            return flatten(
                [_expecting(s, stmt.seq[i + 1 :]) if _expects(s) else visit(s)
                 for i, s in enumerate(stmt.seq)]
            )  # fmt: skip
        if isinstance(stmt, (tirx.Evaluate, tirx.BufferStore)):
            condition = _condition_of(stmt)
            return stmt if condition is None else tirx.IfThenElse(condition, stmt, None)
        return rewrite_children(stmt, visit)

    return func.with_body(ir_transform(visit(func.body), None, _index, ["tirx.Call"]))


def _expects(stmt: tirx.Stmt) -> bool:
    return op_name(getattr(stmt, "value", None)) in EXPECTS


def _expecting(stmt: tirx.Evaluate, following: list[tirx.Stmt]) -> tirx.Stmt:
    """Make ``stmt``, which announces bytes to a barrier, depend on the next load in ``following``.

    It then announces only the bytes of loads that are executed.
    """
    loads = itertools.takewhile(lambda s: not _expects(s), following)
    condition = next((c for s in loads if (c := _condition_of(s)) is not None), None)
    if condition is None:
        return stmt
    call = stmt.value
    barrier, size = call.args
    size = tirx.Select(condition, size, tirx.const(0, size.dtype))
    return tirx.Evaluate(tirx.Call(call.dtype, call.op, [barrier, size], call.annotations))


def _condition_of(stmt: tirx.Stmt) -> tirx.PrimExpr | None:
    """Return the condition of a load; None for other statements."""
    marks = calls_in(stmt, lambda call: op_name(call) == ONLY_IF)
    return marks[0].args[0] if marks else None


def _index(call: tirx.Call) -> tirx.PrimExpr | None:
    return call.args[1] if op_name(call) == ONLY_IF else None
