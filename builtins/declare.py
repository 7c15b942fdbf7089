"""How a builtin is declared: one typed stub, from which the op, the checks and the lowering
follow.

The stub's signature is data. Parameters annotated with a pointer or a value are operands,
``Literal`` parameters are words, ``Constant`` parameters are compile-time integers; the docstring
is the manual.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tilelang.language as T
from tilelang import tvm
from tvm import tirx

from .errors import reject
from .qualifiers import CXX_RESERVED, PTX_TYPES
from .symmetric import is_scratch


@dataclass(frozen=True)
class Pointer:
    """An element of a tensor, taken by address."""

    access: Literal["r", "w", "rw"]
    space: Literal["global", "shared", "barrier"] = "global"
    optional: bool = False
    extent: str = ""
    """Operand that says how many elements are accessed; TileLang must know in shared memory."""


@dataclass(frozen=True)
class ElementOf:
    """A value of the element type of the pointer operand ``ref``."""

    ref: str


@dataclass(frozen=True)
class Scalar:
    """A value converted to ``dtype``."""

    dtype: str


@dataclass(frozen=True)
class ConstantInt:
    """A Python integer, known when the program is traced."""


@dataclass(frozen=True)
class ConstantBool:
    """A Python bool, known when the program is traced."""


@dataclass(frozen=True)
class TraceOnly:
    """Used by the stub's body when the program is traced; no operand of the intrinsic."""


Read = Annotated[Any, Pointer("r")]
Write = Annotated[Any, Pointer("w")]
ReadWrite = Annotated[Any, Pointer("rw")]
OptionalReadWrite = Annotated[Any, Pointer("rw", optional=True)]
SharedRead = Annotated[Any, Pointer("r", "shared", extent="size")]
SharedWrite = Annotated[Any, Pointer("w", "shared", extent="size")]
Barrier = Annotated[Any, Pointer("rw", "barrier")]
Element = Annotated[Any, ElementOf("ref")]
Int32 = Annotated[Any, Scalar("int32")]
Int64 = Annotated[Any, Scalar("int64")]
Constant = Annotated[int, ConstantInt()]
ConstantFlag = Annotated[bool, ConstantBool()]
Peer = Annotated[Any, TraceOnly()]

Level = Literal["thread", "warp", "block", "leader"]
"""Who runs it: each thread that reaches it, a whole warp, the block, or one elected thread."""


@dataclass(frozen=True)
class Builtin:
    """One intrinsic, as declared."""

    name: str
    operands: tuple[tuple[str, Any], ...]
    words: tuple[tuple[str, tuple[str, ...]], ...]
    result: Any
    types: tuple[str, ...]
    op_types: Mapping[str, tuple[str, ...]]
    vectors: tuple[str, ...]
    hidden: tuple[str, ...]
    level: Level
    barrier_before: bool
    barrier_after: bool
    proxy_fence: bool
    releases: bool
    waits: bool
    observes: bool
    sm: int
    type_sm: Mapping[str, int]
    signature: inspect.Signature
    doc: str

    @property
    def op_name(self) -> str:
        return f"tileweave.{self.name}"

    @property
    def op(self) -> tvm.ir.Op:
        return tvm.ir.Op.get(self.op_name)

    @property
    def arity(self) -> int:
        """Arguments of a call: operands, then the PTX type if it has one, then words."""
        return len(self.operands) + len(self.hidden) + bool(self.types) + len(self.words)

    @property
    def is_barrier(self) -> bool:
        """Whether the whole block takes part in it, as one: it meets before and after it."""
        return self.level == "leader" and self.barrier_before and self.barrier_after

    def word(self, call: tirx.Call, name: str) -> str:
        """The word that ``call`` was traced with for the parameter ``name``."""
        index = [n for n, _ in self.words].index(name)
        return call.args[self.arity - len(self.words) + index].value

    def operand(self, call: tirx.Call, name: str) -> tirx.PrimExpr:
        """What ``call`` was traced with for the parameter or the hidden operand ``name``."""
        return call.args[[*(n for n, _ in self.operands), *self.hidden].index(name)]

    def types_of(self, op: str | None) -> tuple[str, ...]:
        """PTX types the instruction takes when its word ``op`` is this one."""
        return self.op_types.get(op, self.types)

    def lanes_of(self, ptx: str) -> tuple[int, ...]:
        """Elements that one access of this PTX type may cover."""
        lanes = PTX_TYPES[ptx][1]
        return (lanes, 2 * lanes, 4 * lanes) if ptx in self.vectors else (lanes,)

    def ptx_type(self, call: tirx.Call) -> str:
        """The PTX type that ``call`` was traced with, or an empty string."""
        return call.args[self.arity - len(self.words) - 1].value if self.types else ""

    def least_sm(self, call: tirx.Call) -> int:
        """The first compute capability that has the instruction ``call`` asks for."""
        return self.type_sm.get(self.ptx_type(call), self.sm)


BUILTINS: dict[str, Builtin] = {}
"""Every builtin, by op name."""


def builtin_of(node: Any) -> Builtin | None:
    """The declaration behind an IR node, or None when it is no call of a builtin."""
    if isinstance(node, tirx.Call) and isinstance(node.op, tvm.ir.Op):
        return BUILTINS.get(node.op.name)
    return None


# Listed, not looked up: the first failing Op.get of a process costs 400 ms of C++ backtrace.
_OPS = set(tvm.ir.Op.list_op_names())


def register_op(name: str, doc: str, num_inputs: int) -> None:
    """Register an opaque TIR operator once; a second call is a no-op."""
    if name in _OPS:
        return
    _OPS.add(name)
    tvm.ir._ffi_api.RegisterOp(name, doc)
    op = tvm.ir.Op.get(name)
    op.set_num_inputs(num_inputs)
    op.set_attr("TCallEffectKind", tirx.CallEffectKind.Opaque)
    op.set_attr("TScriptPrinterName", name)


def builtin(
    *,
    types: str = "",
    op_types: Mapping[str, str] | None = None,
    vectors: str = "",
    hidden: Sequence[str] = (),
    level: Level = "thread",
    barrier_before: bool = False,
    barrier_after: bool = False,
    proxy_fence: bool = False,
    releases: bool = False,
    waits: bool = False,
    observes: bool = False,
    sm: int = 80,
    type_sm: Mapping[str, int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., tirx.PrimExpr]]:
    """Declare a builtin from its stub.

    The stub's body runs when the program is traced. It may refuse its arguments, and may return a
    dict of those it replaces.

    Args:
        types: PTX types the instruction takes, when it does not take all.
        op_types: those it takes for one value of its word ``op``, where they are fewer.
        vectors: those it also takes as vectors of 2 and 4 (``.v2``, ``.v4``).
        hidden: operands the compiler supplies after the declared ones (see ``builtins/implicit.py``).
        level: who runs it. A ``leader`` builtin is run by one thread of the block, whoever reaches
            it.
        barrier_before, barrier_after: the block meets before or after it.
        proxy_fence: it accesses shared memory by the async proxy: before the block meets, every
            thread makes its own accesses to shared memory visible there.
        releases: it may publish earlier writes: bulk stores must be complete before it. Builtins
            with a ``sem`` word release when the word says so.
        waits: it stands until a flag has a value, and guards the loads after it.
        observes: it reads what others may change meanwhile. Builtins that wait or answer do.
        sm: the first compute capability (80, 90, 100) that has the instruction.
        type_sm: the same for single PTX types, where it is a later one.
    """

    def declare(stub: Callable[..., Any]) -> Callable[..., tirx.PrimExpr]:
        name = stub.__name__
        hints = typing.get_type_hints(stub, include_extras=True)
        signature = inspect.signature(stub)
        operands, words = [], []
        for parameter in signature.parameters:
            hint = _without_none(hints[parameter])
            if typing.get_origin(hint) is Literal:
                words.append((parameter, typing.get_args(hint)))
            elif not isinstance(hint.__metadata__[0], TraceOnly):
                operands.append((parameter, hint.__metadata__[0]))
        result = hints.get("return")
        spec = Builtin(
            name=name,
            operands=tuple(operands),
            words=tuple(words),
            result=result.__metadata__[0] if typing.get_origin(result) is Annotated else None,
            types=tuple(types.split()),
            op_types={op: tuple(legal.split()) for op, legal in (op_types or {}).items()},
            vectors=tuple(vectors.split()),
            hidden=tuple(hidden),
            level=level,
            barrier_before=barrier_before,
            barrier_after=barrier_after,
            proxy_fence=proxy_fence,
            releases=releases,
            waits=waits,
            observes=observes or waits or bool(operands and result is not type(None)),
            sm=sm,
            type_sm=dict(type_sm or {}),
            signature=signature,
            doc=inspect.getdoc(stub) or "",
        )
        register_op(spec.op_name, spec.doc.split("\n")[0], spec.arity)
        BUILTINS[spec.op_name] = spec

        @functools.wraps(stub)
        def trace(*args: Any, **kwargs: Any) -> tirx.PrimExpr:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise reject(name, str(error), f"{name}{_usage(signature)}") from None
            bound.apply_defaults()
            _check_words(spec, bound.arguments)
            for parameter, kind in spec.operands:
                if isinstance(kind, ElementOf):
                    bound.arguments[parameter] = _vector(bound.arguments[parameter])
            return _trace(spec, {**bound.arguments, **(stub(**bound.arguments) or {})})

        return trace

    return declare


def _usage(signature: inspect.Signature) -> inspect.Signature:
    parameters = signature.parameters.values()
    return inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters])


def _without_none(hint: Any) -> Any:
    """``X`` for ``X | None``; Python 3.10 reads every default of None as such."""
    members = [m for m in typing.get_args(hint) if m is not type(None)]
    return members[0] if type(None) in typing.get_args(hint) else hint


def _check_words(spec: Builtin, arguments: dict[str, Any]) -> None:
    for parameter, legal in spec.words:
        if arguments[parameter] not in legal:
            raise reject(
                spec.name, f"{parameter}={arguments[parameter]!r}", " or ".join(map(repr, legal))
            )


def _trace(spec: Builtin, arguments: dict[str, Any]) -> tirx.PrimExpr:
    from .implicit import supply

    operands: list[tirx.PrimExpr] = []
    for parameter, kind in spec.operands:
        operands.append(_operand(spec, parameter, kind, arguments))
    operands.extend(supply(kind, spec, arguments) for kind in spec.hidden)
    words = [arguments[parameter] for parameter, _ in spec.words]
    if spec.types:
        words.insert(0, _ptx_type(spec, arguments))
    strings = [tirx.StringImm(w) for w in words]
    return tirx.call_intrin(_result_dtype(spec, arguments), spec.op, *operands, *strings)


def _operand(spec: Builtin, parameter: str, kind: Any, arguments: dict[str, Any]) -> tirx.PrimExpr:
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
    """Normalise a tensor or ``tensor[i, j]`` to one element, checking the memory it lives in."""
    if isinstance(ref, tirx.Buffer):
        ref = tirx.BufferLoad(ref, [0] * len(ref.shape))
    if isinstance(ref, tirx.BufferRegion):
        ref = tirx.BufferLoad(ref.buffer, [r.min for r in ref.region])
    if not isinstance(ref, tirx.BufferLoad):
        raise reject(
            op, f"{parameter}={ref!r}", f"an element of a {space}-memory tensor, such as S[i]"
        )
    scope = "global" if is_scratch(ref.buffer) else ref.buffer.scope()
    found = "barrier" if "barrier" in scope else "shared" if scope.startswith("shared") else scope
    if found != space:
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
    """Bytes of one element of ``src`` and ``dst``: one type, of 1, 2, 4, 8 or 16 bytes."""
    source, target = buffer_of(src), buffer_of(dst)
    if source.dtype != target.dtype:
        raise reject(
            op,
            f"src={source.name} has type {source.dtype}",
            f"type {target.dtype}, as dst={target.name}",
        )
    kind = tvm.DataType(str(source.dtype))
    if kind.bits * kind.lanes not in (8, 16, 32, 64, 128):
        raise reject(op, f"src={source.name} has type {kind}", "elements of 1, 2, 4, 8 or 16 bytes")
    return kind.bits * kind.lanes // 8


def buffer_of(ref: Any) -> tirx.Buffer:
    return ref if isinstance(ref, tirx.Buffer) else ref.buffer


def ref_dtype(ref: Any, value: Any = None) -> str:
    """Element type of ``ref``, widened to the lanes of a vector ``value`` of the same element."""
    dtype = tvm.DataType(str(buffer_of(ref).dtype))
    lanes = tvm.DataType(str(value.dtype)).lanes if isinstance(value, tirx.PrimExpr) else 1
    return str(dtype.with_lanes(lanes)) if dtype.lanes == 1 and lanes > 1 else str(dtype)


def _vector(value: Any) -> Any:
    """A slice of constant length along the last axis, ``x[i, 0:8]``, as a vector."""
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
    """A Python number as one of ``dtype``; negative ones become unsigned by their bits."""
    if not _is_integer(dtype):
        return float(value)
    bits = tvm.DataType(dtype).bits
    low, high = -(1 << (bits - 1)), (1 << (bits - dtype.startswith("int"))) - 1
    if not float(value).is_integer() or not low <= value <= high:
        raise reject(
            spec.name, f"{parameter}={value!r}", f"a value of type {dtype}, {low} to {high}"
        )
    return int(value) + (1 << bits) if value < 0 and dtype.startswith("uint") else int(value)


def _ptx_type(spec: Builtin, arguments: dict[str, Any]) -> str:
    ref = arguments[spec.operands[0][0]]
    found = tvm.DataType(ref_dtype(ref, arguments.get("value")))
    lanes = found.lanes * arguments.get("lanes", 1)
    legal = spec.types_of(arguments.get("op"))
    for ptx in legal:
        if PTX_TYPES[ptx][0] == str(found.with_lanes(1)) and lanes in spec.lanes_of(ptx):
            return ptx
    what = f"{buffer_of(ref).name} has type {found}"
    if "lanes" in arguments:
        what += f", lanes={arguments['lanes']}"
    if spec.op_types:
        what = f"op={arguments['op']!r}: {what}"
    raise reject(spec.name, what, ", ".join(t for p in legal for t in _tilelang_types(spec, p)))


def _tilelang_types(spec: Builtin, ptx: str) -> list[str]:
    dtype = PTX_TYPES[ptx][0]
    return [dtype if lanes == 1 else f"{dtype}x{lanes}" for lanes in spec.lanes_of(ptx)]


def _result_dtype(spec: Builtin, arguments: dict[str, Any]) -> str:
    if spec.result is None:
        return "handle"
    if isinstance(spec.result, Scalar):
        return spec.result.dtype
    dtype = tvm.DataType(ref_dtype(arguments[spec.result.ref], arguments.get("value")))
    return str(dtype.with_lanes(dtype.lanes * arguments.get("lanes", 1)))


def lowered_call(call: tirx.Call) -> tirx.PrimExpr:
    """``tileweave.x(operands, words)`` as the call of the template ``tw::x<words>(operands)``."""
    spec = BUILTINS[call.op.name]
    count = len(spec.words) + bool(spec.types)
    cut = len(call.args) - count
    operands, words = list(call.args[:cut]), [w.value for w in call.args[cut:]]
    names = (["type"] if spec.types else []) + [n for n, _ in spec.words]
    template = [_enumerator(n, w) for n, w in zip(names, words, strict=True)]
    kinds = [kind for _, kind in spec.operands] + [None] * len(spec.hidden)
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
    """A call that returns a vector.

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


def _lanes(expr: tirx.PrimExpr) -> int:
    return tvm.DataType(str(expr.dtype)).lanes


def _enumerator(parameter: str, word: str) -> str:
    return f"tw::{parameter.capitalize()}::{word}{'_' if word in CXX_RESERVED else ''}"
