"""Quotients and remainders of negative multiples, which TVM simplifies wrongly."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform

from .walk import nodes_in

_LIMIT = 1 << 30
"""Limit of the values that are added to a dividend of 32 bits; larger ones need 64 bits."""


def with_positive_factors(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Add multiples of the divisor to a dividend that is a negative multiple of one value, up to
    multiples of the divisor.

    TVM's ``Analyzer.simplify`` gives another value to such a quotient or remainder if the value or
    the expression around it divides, too: ``(8 - j // 4) % 8`` becomes ``-(j % -32 // 4)``, which
    is 8 for ``j = 1``, and ``(0 - j) % 8 // 3`` becomes 0. With a positive factor it is right:
    ``j // 4 * 7 % 8``.
    """
    analyzer = Analyzer()
    for loop in nodes_in(func.body, tirx.For):
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def change(node: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr | None:
        divisor, is_signed = node.b, str(node.dtype).startswith("int")
        if not is_signed or not isinstance(divisor, tirx.IntImm) or divisor.value <= 0:
            return None
        dividend, known, rest = analyzer.rewrite_simplify(node.a), 0, []
        for factor, value in _terms(dividend):
            bound = analyzer.const_int_bound(value)
            if bound.min_value == bound.max_value:
                known += factor * bound.min_value
            elif factor % divisor.value:
                rest.append((factor, value))
        if known % divisor.value or len(rest) != 1 or rest[0][0] > 0:
            return None
        # The expressions around it must see which terms remain.
        return analyzer.simplify(
            _with_positive_factor(type(node)(dividend, divisor), *rest[0], analyzer)
        )

    body = ir_transform(func.body, None, change, ["tirx.FloorDiv", "tirx.FloorMod"])
    return func.with_body(body)


def _terms(dividend: tirx.PrimExpr) -> list[tuple[int, tirx.PrimExpr]]:
    """Return the different terms of a sum with their factors."""
    terms: list[tuple[int, tirx.PrimExpr]] = []
    for factor, value in summands(dividend, 1):
        for place, (other, term) in enumerate(terms):
            if ir.structural_equal(term, value):
                terms[place] = (other + factor, term)
                break
        else:
            terms.append((factor, value))
    return terms


def summands(value: tirx.PrimExpr, factor: int) -> list[tuple[int, tirx.PrimExpr]]:
    """Return the terms of ``factor * value`` with their factors."""
    if isinstance(value, tirx.Cast) and str(value.dtype).startswith("int"):
        return [(f, v.astype(value.dtype)) for f, v in summands(value.value, factor)]
    if isinstance(value, tirx.Add):
        return summands(value.a, factor) + summands(value.b, factor)
    if isinstance(value, tirx.Sub):
        return summands(value.a, factor) + summands(value.b, -factor)
    if isinstance(value, tirx.Mul):
        for number, other in ((value.a, value.b), (value.b, value.a)):
            if isinstance(number, tirx.IntImm):
                return summands(other, factor * number.value)
    return [(factor, value)]


def _with_positive_factor(
    node: tirx.FloorDiv | tirx.FloorMod, factor: int, value: tirx.PrimExpr, analyzer: Analyzer
) -> tirx.PrimExpr:
    """Return the value of ``node``, where the negative ``factor`` of ``value`` becomes positive."""
    bound, divisor = analyzer.const_int_bound(value), node.b.value
    count = -(factor // divisor)
    largest = count * divisor * max(abs(bound.min_value), abs(bound.max_value))
    dtype = "int64" if largest >= _LIMIT else str(node.dtype)
    value = value.astype(dtype)
    dividend = node.a.astype(dtype) + value * tirx.const(count * divisor, dtype)
    result = type(node)(dividend, tirx.const(divisor, dtype))
    if isinstance(node, tirx.FloorDiv):
        result = result - value * tirx.const(count, dtype)
    return result.astype(node.dtype)
