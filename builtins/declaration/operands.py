"""Conversion of a builtin's arguments to operands of its TIR call."""

from __future__ import annotations

from typing import Any

import tilelang.language as T
from tilelang import tvm
from tvm import tirx

from ..errors import reject
from ..spec import (
    Builtin,
    ConstantBool,
    DataOf,
    ElementOf,
    Pointer,
    Scalar,
)
from ..symmetric import is_scratch
from .qualifiers import PTX_TYPES

WORD_DATA_BITS = 32
"""Bits of data in a word of the LL protocol."""


def trace_operand(
    spec: Builtin, parameter: str, kind: Any, arguments: dict[str, Any]
) -> tirx.PrimExpr:
    """Return the operand of the TIR call for the argument ``parameter``; refuse an illegal one."""
    value = arguments[parameter]
    if isinstance(kind, Pointer):
        if kind.optional and value is None:
            return tirx.reinterpret("handle", tirx.const(0, "uint64"))
        load = element(spec.name, parameter, value, kind.space)
        if kind.space == "barrier":
            return T.address_of(load)
        extent = arguments[kind.extent] if kind.extent else None
        return T.access_ptr(load, kind.access, extent=extent)
    if isinstance(kind, ElementOf):
        shaped_by = arguments.get("value", value)  # all values of a builtin have its lanes
        return _convert(spec, parameter, value, ref_dtype(arguments[kind.ref], shaped_by))
    if isinstance(kind, DataOf):
        if not isinstance(value, tirx.PrimExpr):
            raise reject(spec.name, f"{parameter}={value!r}", "a value with a type")
        return value
    if isinstance(kind, Scalar):
        return _convert(spec, parameter, value, kind.dtype)
    if isinstance(kind, ConstantBool):
        if not isinstance(value, bool):
            raise reject(spec.name, f"{parameter}={value!r}", "True or False")
        return tirx.IntImm("bool", value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise reject(spec.name, f"{parameter}={value!r}", "a Python integer")
    return tirx.IntImm("int32", value)


def element(op: str, parameter: str, ref: Any, space: str) -> tirx.BufferLoad:
    """Return the first element of a tensor or region; check its memory and its indices."""
    if isinstance(ref, tirx.Buffer):
        ref = tirx.BufferLoad(ref, [0] * len(ref.shape))
    if isinstance(ref, tirx.BufferRegion):
        ref = tirx.BufferLoad(ref.buffer, [r.min for r in ref.region])
    if not isinstance(ref, tirx.BufferLoad):
        raise reject(
            op, f"{parameter}={ref!r}", f"an element of a {space}-memory tensor, such as S[i]"
        )
    scope = "global" if is_scratch(ref.buffer) else ref.buffer.scope()
    memory = "barrier" if "barrier" in scope else "shared" if scope.startswith("shared") else scope
    if memory != space:
        raise reject(
            op, f"{parameter}={ref.buffer.name} is in {scope} memory", f"a {space}-memory tensor"
        )
    for axis, (index, extent) in enumerate(zip(ref.indices, ref.buffer.shape, strict=True)):
        if not isinstance(index, tirx.IntImm) or not isinstance(extent, tirx.IntImm):
            continue
        if not -int(extent) <= int(index) < int(extent):
            raise reject(
                op, f"{parameter}={ref} has index {index} on axis {axis}", f"less than {extent}"
            )
    return ref


def require_same_type(op: str, src: Any, dst: Any) -> int:
    """Require one type of 1, 2, 4, 8 or 16 bytes for ``src`` and ``dst``; return its bytes."""
    source, target = buffer_of(src), buffer_of(dst)
    if source.dtype != target.dtype:
        raise reject(
            op,
            f"src={source.name} has type {source.dtype}",
            f"type {target.dtype}, as dst={target.name}",
        )
    dtype = tvm.DataType(str(source.dtype))
    if dtype.bits * dtype.lanes not in (8, 16, 32, 64, 128):
        problem = f"src={source.name} has type {dtype}"
        raise reject(op, problem, "elements of 1, 2, 4, 8 or 16 bytes")
    return dtype.bits * dtype.lanes // 8


def buffer_of(ref: Any) -> tirx.Buffer:
    return ref if isinstance(ref, tirx.Buffer) else ref.buffer


def ref_dtype(ref: Any, value: Any = None) -> str:
    """Return the element type of ``ref``, with the lanes of ``value`` if that is a vector."""
    dtype = tvm.DataType(str(buffer_of(ref).dtype))
    lanes = tvm.DataType(str(value.dtype)).lanes if isinstance(value, tirx.PrimExpr) else 1
    return str(dtype.with_lanes(lanes)) if dtype.lanes == 1 and lanes > 1 else str(dtype)


def as_vector(value: Any) -> Any:
    """Return a slice of constant length along the last axis, such as ``x[i, 0:8]``, as a vector.

    Other values are returned unchanged.
    """
    if not isinstance(value, tirx.BufferRegion):
        return value
    *outer, last = value.region
    if not isinstance(last.extent, tirx.IntImm) or any(not _is_one(r.extent) for r in outer):
        return value
    if int(last.extent) < 1:
        raise reject("vector", f"{value}", "a slice of at least one element")
    last = last.min if _is_one(last.extent) else tirx.Ramp(last.min, 1, last.extent)
    return tirx.BufferLoad(value.buffer, [*(r.min for r in outer), last])


def _is_one(extent: tirx.PrimExpr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


def _convert(spec: Builtin, parameter: str, value: Any, dtype: str) -> tirx.PrimExpr:
    if isinstance(value, (bool, int, float)):
        return tirx.const(_literal(spec, parameter, value, dtype), dtype)
    if not isinstance(value, tirx.PrimExpr):
        raise reject(spec.name, f"{parameter}={value!r}", f"a value of type {dtype}")
    if str(value.dtype) == dtype:
        return value
    if tvm.DataType(str(value.dtype)).lanes != tvm.DataType(dtype).lanes:
        raise reject(spec.name, f"{parameter} has type {value.dtype}", f"type {dtype}")
    if _is_integer(dtype) and not _is_integer(str(value.dtype)):
        raise reject(
            spec.name,
            f"{parameter}={value} has type {value.dtype}",
            f"an integer, such as T.Cast({dtype!r}, ...)",
        )
    return tirx.Cast(dtype, value)


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _literal(spec: Builtin, parameter: str, value: Any, dtype: str) -> Any:
    """Return a Python number as a value of ``dtype``; a negative one wraps to an unsigned type."""
    if not _is_integer(dtype):
        return float(value)
    bits = tvm.DataType(dtype).bits
    low, high = -(1 << (bits - 1)), (1 << (bits - dtype.startswith("int"))) - 1
    if not float(value).is_integer() or not low <= value <= high:
        raise reject(
            spec.name, f"{parameter}={value!r}", f"a value of type {dtype}, {low} to {high}"
        )
    return int(value) + (1 << bits) if value < 0 and dtype.startswith("uint") else int(value)


def ptx_type_of(spec: Builtin, arguments: dict[str, Any]) -> str:
    """Return the PTX type of a call's element; refuse a type that the instruction lacks."""
    ref = arguments[spec.operands[0][0]]
    dtype = tvm.DataType(ref_dtype(ref, arguments.get("value")))
    lanes = dtype.lanes * arguments.get("lanes", 1)
    legal = spec.types_of(arguments.get("op"))
    for ptx in legal:
        if PTX_TYPES[ptx][0] == str(dtype.with_lanes(1)) and lanes in spec.lanes_of(ptx):
            return ptx
    problem = f"{buffer_of(ref).name} has type {dtype}"
    if "lanes" in arguments:
        problem += f", lanes={arguments['lanes']}"
    if spec.op_types:
        problem = f"op={arguments['op']!r}: {problem}"
    raise reject(spec.name, problem, ", ".join(t for p in legal for t in _tilelang_types(spec, p)))


def _tilelang_types(spec: Builtin, ptx: str) -> list[str]:
    dtype = PTX_TYPES[ptx][0]
    return [dtype if lanes == 1 else f"{dtype}x{lanes}" for lanes in spec.lanes_of(ptx)]


def result_dtype(spec: Builtin, arguments: dict[str, Any]) -> str:
    """Return the type of a call's result; ``handle`` if it has none."""
    if spec.result is None:
        return "handle"
    if isinstance(spec.result, Scalar):
        return spec.result.dtype
    if isinstance(spec.result, DataOf):
        element_type = tvm.DataType(arguments["dtype"])
        lanes = arguments["words"] * WORD_DATA_BITS // element_type.bits
        return str(element_type.with_lanes(lanes))
    dtype = tvm.DataType(ref_dtype(arguments[spec.result.ref], arguments.get("value")))
    return str(dtype.with_lanes(dtype.lanes * arguments.get("lanes", 1)))
