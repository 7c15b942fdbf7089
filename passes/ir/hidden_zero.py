"""An expression that is 0, which TVM cannot simplify and nvcc removes."""

from __future__ import annotations

from tvm import DataType, tirx


def plus_hidden_zero(index: tirx.PrimExpr, variable: tirx.Var) -> tirx.PrimExpr:
    """Return an index, of one element or of several, plus ``T.bitwise_or(variable, 0) - variable``,
    so that TVM does not simplify it."""
    dtype, lanes = str(index.dtype), DataType(str(index.dtype)).lanes
    zero = tirx.bitwise_or(variable, tirx.const(0, variable.dtype)) - variable
    zero = tirx.Cast(dtype.split("x")[0], zero)
    return index + (tirx.Broadcast(zero, lanes) if lanes > 1 else zero)
