"""Keep dividends with negative loop variables out of TVM's simplification of indices."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.walk import variables_in


def hide_negative_factors(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Hide dividends in which a loop variable has a negative factor.

    TileLang simplifies the flat index of an access by TVM's ``IterMapSimplify``. Where a loop
    variable has a negative factor in the dividend of ``//`` or ``%``, and is the only one in the
    index, the result is wrong: ``(7 - i) // 2`` becomes ``i // -2 + 3``, and ``(rank + 3 - i) % 4``
    becomes ``(0 - i) % 4``. It leaves indices with other operations than sums, products, ``//`` and
    ``%`` as they are, so this pass adds one. nvcc removes the added operation.

    Before: ``x[(me + 3 - step) % 4]``
    After:  ``x[T.bitwise_or(me + 3 - step, 0) % 4]``
    """
    constants = set(func.params)

    def change(node: tirx.FloorDiv | tirx.FloorMod) -> tirx.PrimExpr | None:
        if not any(
            factor < 0 and not constants.issuperset(variables_in(value))
            for factor, value in _terms(node.a, 1)
        ):
            return None
        return type(node)(tirx.bitwise_or(node.a, tirx.const(0, node.a.dtype)), node.b)

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
