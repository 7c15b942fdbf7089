"""Write quotients and remainders so that no loop variable has a negative factor."""

from __future__ import annotations

from tvm import ir, tirx
from tvm.arith import Analyzer
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import nodes_in, variables_in

_LIMIT = 1 << 30
"""What is added to a dividend of 32 bits is smaller."""


def make_factors_positive(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Add multiples of the divisor to a dividend until no loop variable has a negative factor.

    TileLang simplifies the flat index of an access by TVM's ``IterMapSimplify``. Where a loop
    variable has a negative factor in the dividend of ``//`` or ``%``, and is the only one in the
    index, the result is wrong: ``(7 - i) // 2`` becomes ``i // -2 + 3``, and ``(rank + 3 - i) % 4``
    becomes ``(0 - i) % 4``. With positive factors it is right.

    It also leaves quotients and remainders of 64 bits as they are in an index of 32 bits. So a
    dividend gets 64 bits if the divisor is no constant, or the multiples may be too large.

    Before: ``x[(me + 3 - step) % 4]``; ``x[(7 - i) // 2]``
    After:  ``x[(me + 3 - step + step * 4) % 4]``; ``x[(7 - i + i * 2) // 2 - i]``
    """
    analyzer, constants = Analyzer(), set(func.params)
    for loop in nodes_in(func.body, tirx.For):
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def change(node: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr | None:
        negative = [
            (-factor, value)
            for factor, value in _terms(node.a, 1)
            if factor < 0 and not constants.issuperset(variables_in(value))
        ]
        return _rewritten(node, negative, analyzer) if negative else None

    body = ir_transform(func.body, None, change, ["tirx.FloorDiv", "tirx.FloorMod"])
    return func.with_body(body)


def _terms(value: tirx.PrimExpr, factor: int) -> list[tuple[int, tirx.PrimExpr]]:
    """Return the terms of a sum with their factors."""
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
    node: tirx.FloorDiv | tirx.FloorMod,
    negative: list[tuple[int, tirx.PrimExpr]],
    analyzer: Analyzer,
) -> tirx.PrimExpr:
    """Return the value of ``node``, whose dividend has these terms, with the factors negated."""
    dtype, divisor = str(node.dtype), node.b
    if not isinstance(divisor, tirx.IntImm):
        return _wide(node)
    counts = [(-(-factor // divisor.value), value) for factor, value in negative]
    largest = [count * divisor.value * _magnitude(value, analyzer) for count, value in counts]
    if dtype != "int64" and sum(largest) >= _LIMIT:
        return _wide(node)
    dividend = node.a
    for count, value in counts:
        dividend = dividend + value * tirx.const(count * divisor.value, dtype)
    result = type(node)(dividend, divisor)
    if isinstance(node, tirx.FloorDiv):
        for count, value in counts:
            result = result - value * tirx.const(count, dtype)
    return result


def _wide(node: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr:
    wide = type(node)(tirx.Cast("int64", node.a), tirx.Cast("int64", node.b))
    return tirx.Cast(str(node.dtype), wide)


def _magnitude(value: tirx.PrimExpr, analyzer: Analyzer) -> int:
    bound = analyzer.const_int_bound(value)
    return max(abs(bound.min_value), abs(bound.max_value))
