"""Protect expressions that TileLang would compile wrongly, or fail to compile."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.symmetric import packed_strides
from ..ir.factors import with_positive_factors
from ..ir.walk import has_loads, nodes_in, op_name, variables_in

_ADDRESSES = frozenset({"tl.region", "tl.access_ptr", "tirx.address_of"})
_LANES = 1 << 16
"""TVM stores a number of lanes modulo this."""
_COMPARISONS = ("tirx.EQ", "tirx.NE", "tirx.LT", "tirx.LE", "tirx.GT", "tirx.GE")
_SOLVED = (
    tirx.Var, tirx.IntImm, tirx.Cast, tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod,
)  # fmt: skip
"""Nodes that the solver supports: it solves comparisons that consist only of these."""


def protect_expressions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Change the form of three kinds of expressions, but not their values.

    Quotients and remainders of negative multiples get positive factors. The other two kinds get an
    operation without effect. nvcc removes it, but TVM cannot simplify it.

    TileLang solves the condition of a branch around ``T.Pipelined`` for its variables, to find what
    the branch accesses. The solver negates constants, which fails for unsigned ones: ``Literal
    value -15 is negative for unsigned integer type uint32``. It skips conditions with other
    operations than sums and products.

    TileLang's ``StorageRewrite`` takes the largest common factor of the flat index of a scalar load
    for the number of lanes of a vector type, which TVM stores in 16 bits with a sign. It fails for
    the factors 32768 to 65535, for 98304 to 131071 and so on ("Can't fetch the lanes of a scalable
    vector at a compile time"). In ``x[row, 0]`` the factor is the length of a row. In
    ``S[me, 1 - me, 0]``, on two ranks, it is the distance of the heaps minus that of ``S[0, 0]``
    and ``S[0, 1]``.

    Before: ``x[(8 - j // 4) % 8]``; ``if counted == T.uint32(15): ...``; ``x[row, 0]``, with 40000
    columns
    After:  ``x[j // 4 * 7 % 8]``; ``if T.bitwise_or(counted, T.uint32(0)) == T.uint32(15): ...``;
    ``x[row, T.bitwise_or(row, 0) - row]``
    """
    func = with_positive_factors(func)
    analyzer = Analyzer()
    for bind in nodes_in(func.body, tirx.Bind):
        if not has_loads(bind.value):
            analyzer.bind(bind.var, bind.value)

    def skip(node: tirx.Call) -> tirx.Call | None:
        return node if op_name(node) in _ADDRESSES else None

    def change(node: tirx.BufferLoad | tirx.Call) -> tirx.BufferLoad | None:
        if not isinstance(node, tirx.BufferLoad) or not _has_large_factor(node, analyzer):
            return None
        *outer, last = node.indices
        variable = variables_in(node)[0]
        zero = _with_no_op(variable) - variable
        return tirx.BufferLoad(node.buffer, [*outer, last + tirx.Cast(str(last.dtype), zero)])

    body = ir_transform(func.body, None, _protect_comparison, list(_COMPARISONS))
    return func.with_body(ir_transform(body, skip, change, ["tirx.BufferLoad", "tirx.Call"]))


def _with_no_op(value: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.bitwise_or(value, tirx.const(0, value.dtype))


def _protect_comparison(node: tirx.PrimExpr) -> tirx.PrimExpr | None:
    is_changed = _is_unsigned(node.a) and _is_solved(node)
    return type(node)(_with_no_op(node.a), node.b) if is_changed else None


def _has_large_factor(load: tirx.BufferLoad, analyzer: Analyzer) -> bool:
    buffer = load.buffer
    if buffer.scope() != "global" or load.dtype != buffer.dtype or not load.indices:
        return False
    strides = buffer.strides or packed_strides(buffer.shape)
    index = analyzer.simplify(sum(i * s for i, s in zip(load.indices, strides, strict=True)))
    return analyzer.modular_set(index).coeff % _LANES >= _LANES // 2


def _is_unsigned(value: tirx.PrimExpr) -> bool:
    kind = tvm.DataType(str(value.dtype))
    return str(kind).startswith("uint") and kind.lanes == 1


def _is_solved(comparison: tirx.PrimExpr) -> bool:
    return all(
        node.same_as(comparison) or isinstance(node, _SOLVED)
        for node in nodes_in(comparison, tirx.PrimExpr)
    )
