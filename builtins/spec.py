"""Declaration of a builtin as data: operands, qualifiers, level, and what it orders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tilelang import tvm
from tvm import tirx

from .qualifiers import PTX_TYPES


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


Participants = Literal["", "grid", "ranks", "blocks"]
"""Who meets at a barrier: all blocks of this launch on this GPU, one block of each rank, or all
blocks of all ranks."""


BulkGroup = Literal["", "commit", "wait"]
"""Role for the groups of asynchronous stores of a thread: it closes a group, or waits for some."""


Relation = Literal["", "eq", "ne", "ge", "gt", "le", "lt", "reached"]
"""Relation between a flag and the value for which a wait waits."""


@dataclass(frozen=True)
class Builtin:
    """One intrinsic, as declared."""

    name: str
    operands: tuple[tuple[str, Any], ...]
    qualifiers: tuple[tuple[str, tuple[str, ...]], ...]
    result: Any
    types: tuple[str, ...]
    op_types: Mapping[str, tuple[str, ...]]
    vectors: tuple[str, ...]
    implicit: tuple[str, ...]
    level: Level
    barrier_before: bool
    barrier_after: bool
    moves: str
    combines: str
    async_proxy: bool
    proxy_fence: bool
    bulk_group: BulkGroup
    participants: Participants
    waits: Relation
    observes: bool
    multicast: bool
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
        """Arguments of a call: operands, then the PTX type if it has one, then qualifiers."""
        return len(self.operands) + len(self.implicit) + bool(self.types) + len(self.qualifiers)

    @property
    def text(self) -> str:
        """The builtin as a program writes it: ``W.signal``."""
        return f"W.{self.name}"

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        """The operands that are accessed in memory."""
        return tuple(kind for _, kind in self.operands if isinstance(kind, Pointer))

    @property
    def writes(self) -> bool:
        """True if it changes memory: run once more it does so once more."""
        return any("w" in pointer.access for pointer in self.pointers)

    @property
    def loads(self) -> bool:
        """True if it returns the value of one element and changes nothing."""
        return bool(self.result and self.pointers) and not (self.writes or self.multicast)

    @property
    def fetches(self) -> bool:
        """True if it changes an element and returns the value before."""
        return self.result is not None and self.writes

    @property
    def signals(self) -> bool:
        """True if it changes a flag once for the whole block."""
        return self.level == "leader" and self.has_qualifier("sem")

    @property
    def is_fence(self) -> bool:
        """True if it orders all accesses of its thread: it has a ``sem`` and no operand."""
        return self.has_qualifier("sem") and not self.operands

    @property
    def is_async_load(self) -> bool:
        """True if it writes shared memory by the async proxy, and completes on an mbarrier."""
        return self.async_proxy and self._moves_shared("w")

    @property
    def is_async_store(self) -> bool:
        """True if it reads shared memory by the async proxy, and completes in a group."""
        return self.async_proxy and self._moves_shared("r")

    def _moves_shared(self, access: str) -> bool:
        return any(p.space == "shared" and p.access == access for p in self.pointers)

    def has_qualifier(self, name: str) -> bool:
        return any(name == qualifier for qualifier, _ in self.qualifiers)

    def qualifier(self, call: tirx.Call, name: str) -> str:
        """Return the qualifier that ``call`` was traced with for the parameter ``name``."""
        index = [n for n, _ in self.qualifiers].index(name)
        return call.args[self.arity - len(self.qualifiers) + index].value

    def combination(self, call: tirx.Call) -> str:
        """The operation by which ``call`` changes memory: ``set`` for a plain store, such as
        ``add`` for a reduction, or an empty string if it changes nothing."""
        if not self.writes:
            return ""
        return self.qualifier(call, "op") if self.has_qualifier("op") else self.combines or "set"

    def operand(self, call: tirx.Call, name: str) -> tirx.PrimExpr:
        """Return the operand of ``call`` for the parameter or the implicit operand ``name``."""
        return call.args[[*(n for n, _ in self.operands), *self.implicit].index(name)]

    def types_of(self, op: str | None) -> tuple[str, ...]:
        """Return the PTX types that the instruction accepts with the qualifier ``op``."""
        return self.op_types.get(op, self.types)

    def lanes_of(self, ptx: str) -> tuple[int, ...]:
        """Elements that one access of this PTX type may cover."""
        lanes = PTX_TYPES[ptx][1]
        return (lanes, 2 * lanes, 4 * lanes) if ptx in self.vectors else (lanes,)

    def ptx_type(self, call: tirx.Call) -> str:
        """The PTX type that ``call`` was traced with, or an empty string."""
        return call.args[self.arity - len(self.qualifiers) - 1].value if self.types else ""

    def least_sm(self, call: tirx.Call) -> int:
        """The first compute capability that has the instruction ``call`` asks for."""
        return self.type_sm.get(self.ptx_type(call), self.sm)


BUILTINS: dict[str, Builtin] = {}
"""Every builtin, by op name."""


def builtin_of(node: Any) -> Builtin | None:
    """Return the declaration of the builtin that an IR node calls, or None for other nodes."""
    if isinstance(node, tirx.Call) and isinstance(node.op, tvm.ir.Op):
        return BUILTINS.get(node.op.name)
    return None


def declaration_of(function: Callable[..., tirx.PrimExpr]) -> Builtin:
    """The declaration of a function of the language, such as ``W.signal``."""
    return BUILTINS[f"tileweave.{function.__name__}"]


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
