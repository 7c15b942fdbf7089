"""Operators that passes insert for later passes, or for TileLang to see a use."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.memory import UNORDERED
from ...builtins.spec import register_op
from .walk import op_name

HOLD = "tileweave.hold"
register_op(HOLD, "a value that is needed here; no code is emitted", 1)


def hold(value: tirx.PrimExpr) -> tirx.Stmt:
    """Return a statement that reads ``value``."""
    return tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get(HOLD), value))


COMPLETE = "tileweave.complete_bulk_stores"
register_op(COMPLETE, "bulk stores issued before this point are complete", 0)


def placeholder() -> tirx.Stmt:
    """Return a placeholder at which bulk stores must be complete.

    ``complete_bulk_stores`` keeps or removes it.
    """
    return tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get(COMPLETE)))


def is_placeholder(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == COMPLETE


ONLY_IF = "tileweave.only_if"
"""Operator ``only_if(condition, index)``: an index of an access that happens under a condition."""
register_op(ONLY_IF, "index of a conditional load", 2)

SYSTEM_ATOMIC = "tileweave.system_atomic"
register_op(SYSTEM_ATOMIC, "T.atomic_* at system scope: template, pointer, operands", -1)


def is_mark(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` marks an access of the next statement."""
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == UNORDERED
