"""An operator that reads a value, so that TileLang's passes see a use. It emits no code."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ...builtins.spec import register_op

HOLD = "tileweave.hold"
register_op(HOLD, "a value that is needed here; no code is emitted", 1)


def hold(value: tirx.PrimExpr) -> tirx.Stmt:
    """Return a statement that reads ``value``."""
    return tirx.Evaluate(tirx.call_intrin("handle", tvm.ir.Op.get(HOLD), value))
