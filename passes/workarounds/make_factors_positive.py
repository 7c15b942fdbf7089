"""Write remainders so that no quotient in their dividend has a negative factor."""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import nodes_in

_LIMIT = 1 << 30
"""What is added to a dividend of 32 bits is smaller."""


def make_factors_positive(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
    """Add multiples of the divisor to a dividend until no quotient or remainder in it has a
    negative factor.

    TVM's ``Analyzer.simplify`` gives another value to a remainder if its dividend is, up to
    multiples of the divisor, a quotient or remainder with a negative factor: ``(8 - j // 4) % 8``
    becomes ``-(j % -32 // 4)``, which is 8 for ``j = 1``. With positive factors it is right.

    Before: ``x[(8 - step // 4) % 8]``
    After:  ``x[(8 - step // 4 + step // 4 * 8) % 8]``
    """
    analyzer = Analyzer()
    for loop in nodes_in(func.body, tirx.For):
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def change(node: tirx.FloorMod) -> tirx.PrimExpr | None:
        if not isinstance(node.b, tirx.IntImm) or not str(node.dtype).startswith("int"):
            return None
        negative = [(-f, value) for f, value in _factors(node.a) if f < 0 and _divides(value)]
        return _rewritten(node, negative, analyzer) if negative else None

    return func.with_body(ir_transform(func.body, None, change, ["tirx.FloorMod"]))


def _divides(value: tirx.PrimExpr) -> bool:
    while isinstance(value, tirx.Cast):
        value = value.value
    return isinstance(value, (tirx.FloorDiv, tirx.FloorMod))


def _factors(dividend: tirx.PrimExpr) -> list[tuple[int, tirx.PrimExpr]]:
    """Return the different terms of a sum with their factors."""
    factors: list[tuple[int, tirx.PrimExpr]] = []
    for factor, term in _terms(dividend, 1):
        others = [(f, t) for f, t in factors if not ir.structural_equal(t, term)]
        same = sum(f for f, t in factors if ir.structural_equal(t, term))
        factors = [*others, (same + factor, term)]
    return factors


def _terms(value: tirx.PrimExpr, factor: int) -> list[tuple[int, tirx.PrimExpr]]:
    """Return the terms of a sum with their factors. A term may occur several times."""
    if isinstance(value, tirx.Cast):
        return [(f, term.astype(value.dtype)) for f, term in _terms(value.value, factor)]
    if isinstance(value, tirx.Add):
        return _terms(value.a, factor) + _terms(value.b, factor)
    if isinstance(value, tirx.Sub):
        return _terms(value.a, factor) + _terms(value.b, -factor)
    if isinstance(value, tirx.Mul):
        for number, other in ((value.a, value.b), (value.b, value.a)):
            if isinstance(number, tirx.IntImm):
                return _terms(other, factor * number.value)
    return [(factor, value)]


def _rewritten(
    node: tirx.FloorMod, negative: list[tuple[int, tirx.PrimExpr]], analyzer: Analyzer
) -> tirx.PrimExpr:
    """Return the value of ``node``, in whose dividend the factors of these terms are negated."""
    divisor = node.b.value
    multiples = [(-(-factor // divisor) * divisor, value) for factor, value in negative]
    largest = sum(multiple * _magnitude(value, analyzer) for multiple, value in multiples)
    dtype = "int64" if largest >= _LIMIT else str(node.dtype)
    dividend = node.a.astype(dtype)
    for multiple, value in multiples:
        dividend = dividend + value.astype(dtype) * tirx.const(multiple, dtype)
    return tirx.FloorMod(dividend, tirx.const(divisor, dtype)).astype(node.dtype)


def _magnitude(value: tirx.PrimExpr, analyzer: Analyzer) -> int:
    bound = analyzer.const_int_bound(value)
    return max(abs(bound.min_value), abs(bound.max_value))
