"""Keep conditions on unsigned integers out of TileLang's solver."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import nodes_in

_COMPARISONS = ("tirx.EQ", "tirx.NE", "tirx.LT", "tirx.LE", "tirx.GT", "tirx.GE")
_SOLVED = (
    tirx.Var, tirx.IntImm, tirx.Cast, tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod,
)  # fmt: skip
"""Nodes that the solver supports: it solves comparisons that consist only of these."""


def compare_unsigned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Keep comparisons of unsigned integers out of TileLang's solver of linear inequalities.

    TileLang solves the condition of a branch around ``T.Pipelined`` for its variables, to find what
    the branch accesses. The solver negates constants, which fails for unsigned ones: ``Literal
    value -15 is negative for unsigned integer type uint32``. It skips conditions with other
    operations than sums and products, so this pass adds one. nvcc removes the added operation.

    Before: ``if counted == T.uint32(15): ...``
    After:  ``if T.bitwise_or(counted, T.uint32(0)) == T.uint32(15): ...``
    """

    def change(node):
        if not _is_unsigned(node.a) or not _is_solved(node):
            return None
        return type(node)(tirx.bitwise_or(node.a, tirx.const(0, node.a.dtype)), node.b)

    return func.with_body(ir_transform(func.body, None, change, list(_COMPARISONS)))


def _is_unsigned(value: tirx.PrimExpr) -> bool:
    kind = tvm.DataType(str(value.dtype))
    return str(kind).startswith("uint") and kind.lanes == 1


def _is_solved(comparison: tirx.PrimExpr) -> bool:
    return all(
        node.same_as(comparison) or isinstance(node, _SOLVED)
        for node in nodes_in(comparison, tirx.PrimExpr)
    )
