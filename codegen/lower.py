"""Lowering of builtin calls to calls of device templates."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from ..builtins.declaration.qualifiers import CXX_RESERVED
from ..builtins.spec import BUILTINS, ConstantBool, ConstantInt, DataOf, ElementOf


def lowered_call(call: tirx.Call) -> tirx.PrimExpr:
    """Return ``tileweave.x(operands, qualifiers)`` as ``tw::x<qualifiers>(operands)``."""
    spec = BUILTINS[call.op.name]
    count = len(call.args) - len(spec.qualifiers) - bool(spec.types)
    operands, qualifiers = list(call.args[:count]), [q.value for q in call.args[count:]]
    names = (["type"] if spec.types else []) + [n for n, _ in spec.qualifiers]
    template = [_enumerator(n, q) for n, q in zip(names, qualifiers, strict=True)]
    kinds = [kind for _, kind in spec.operands] + [None] * len(spec.implicit)
    runtime = []
    for operand, kind in zip(operands, kinds, strict=True):
        if isinstance(kind, ConstantInt):
            template.append(str(int(operand)))
        elif isinstance(kind, ConstantBool):
            template.append("true" if operand else "false")
        elif isinstance(kind, (DataOf, ElementOf)) and _lanes(operand) > 1:
            runtime.append(tirx.call_extern("handle", "tw::bits", operand))
        else:
            runtime.append(operand)
    name = f"tw::{spec.name}" + (f"<{', '.join(template)}>" if template else "")
    if _lanes(call) > 1:
        return _vector_call(call.dtype, name, runtime)
    result = tirx.call_extern(call.dtype, name, *runtime)
    if isinstance(spec.result, DataOf):  # the template returns bits, which a conversion would keep
        value = tirx.Var("value", call.dtype)
        return tirx.Let(value, result, value)
    return result


def _vector_call(dtype: str, name: str, arguments: list[tirx.PrimExpr]) -> tirx.PrimExpr:
    """Return a call whose result is a vector.

    TileLang splits an extern call of vector type into one call for each lane, but it does not split
    ``tl.ldg``. So the call becomes the argument of a ``tl.ldg``, and ``bits.cuh`` overloads its
    printed form to return the argument. The variable prevents that two equal calls are merged.
    """
    vector = tvm.DataType(str(dtype))
    call = tirx.call_extern("handle", name, *arguments)
    bits = tirx.call_extern("handle", "tw::bits", call)
    load = tirx.Call(dtype, tvm.ir.Op.get(f"tl.ldg{vector.bits * vector.lanes}"), [bits])
    value = tirx.Var("value", dtype)
    return tirx.Let(value, load, value)


def _enumerator(parameter: str, qualifier: str) -> str:
    return f"tw::{parameter.capitalize()}::{qualifier}{'_' if qualifier in CXX_RESERVED else ''}"


def _lanes(expr: tirx.PrimExpr) -> int:
    return tvm.DataType(str(expr.dtype)).lanes
