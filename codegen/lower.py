"""Lowering of a builtin's call to a call of its device template."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ..builtins.qualifiers import CXX_RESERVED
from ..builtins.spec import (
    BUILTINS,
    ConstantBool,
    ConstantInt,
    ElementOf,
)


def lowered_call(call: tirx.Call) -> tirx.PrimExpr:
    """Return ``tileweave.x(operands, qualifiers)`` as ``tw::x<qualifiers>(operands)``."""
    spec = BUILTINS[call.op.name]
    count = len(spec.qualifiers) + bool(spec.types)
    cut = len(call.args) - count
    operands, qualifiers = list(call.args[:cut]), [q.value for q in call.args[cut:]]
    names = (["type"] if spec.types else []) + [n for n, _ in spec.qualifiers]
    template = [_enumerator(n, q) for n, q in zip(names, qualifiers, strict=True)]
    kinds = [kind for _, kind in spec.operands] + [None] * len(spec.implicit)
    runtime = []
    for operand, kind in zip(operands, kinds, strict=True):
        if isinstance(kind, ConstantInt):
            template.append(str(int(operand)))
        elif isinstance(kind, ConstantBool):
            template.append("true" if operand else "false")
        elif isinstance(kind, ElementOf) and _lanes(operand) > 1:
            runtime.append(tirx.call_extern("handle", "tw::bits", operand))
        else:
            runtime.append(operand)
    name = f"tw::{spec.name}" + (f"<{', '.join(template)}>" if template else "")
    if _lanes(call) > 1:
        return _vector_call(call.dtype, name, runtime)
    return tirx.call_extern(call.dtype, name, *runtime)


def _vector_call(dtype: str, name: str, arguments: list[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return a call whose result is a vector.

    TileLang makes an extern call of vector type one call a lane. It prints its own ``tl.ldg`` as it
    is, so the call goes inside one, and ``bits.cuh`` overloads what that prints to hand its
    argument through. The variable keeps two equal calls from being merged into one.
    """
    kind = tvm.DataType(str(dtype))
    call = tirx.call_extern("handle", name, *arguments)
    bits = tirx.call_extern("handle", "tw::bits", call)
    handed = tirx.Call(dtype, tvm.ir.Op.get(f"tl.ldg{kind.bits * kind.lanes}"), [bits])
    value = tirx.Var("value", dtype)
    return tirx.Let(value, handed, value)


def _enumerator(parameter: str, qualifier: str) -> str:
    return f"tw::{parameter.capitalize()}::{qualifier}{'_' if qualifier in CXX_RESERVED else ''}"


def _lanes(expr: tirx.PrimExpr) -> int:
    return tvm.DataType(str(expr.dtype)).lanes
