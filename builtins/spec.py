"""Declaration of a builtin as data: its operands, qualifiers and roles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tilelang import tvm
from tvm import tirx

from .declaration.qualifiers import PTX_TYPES


@dataclass(frozen=True)
class Pointer:
    """An operand that is the address of an element of a tensor."""

    access: Literal["r", "w", "rw"]
    space: Literal["global", "shared", "barrier"] = "global"
    optional: bool = False
    extent: str = ""
    """Operand that holds the number of accessed elements. TileLang needs it for shared memory."""


@dataclass(frozen=True)
class ElementOf:
    """A value of the element type of the pointer operand ``ref``."""

    ref: str


@dataclass(frozen=True)
class DataOf:
    """A value of any type; as a result, one of the type that the argument ``dtype`` names."""


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
    """An argument that only the stub's body uses; the intrinsic has no such operand."""


Read = Annotated[Any, Pointer("r")]


Write = Annotated[Any, Pointer("w")]


ReadWrite = Annotated[Any, Pointer("rw")]


OptionalReadWrite = Annotated[Any, Pointer("rw", optional=True)]


SharedRead = Annotated[Any, Pointer("r", "shared", extent="size")]


SharedWrite = Annotated[Any, Pointer("w", "shared", extent="size")]


Barrier = Annotated[Any, Pointer("rw", "barrier")]


Element = Annotated[Any, ElementOf("ref")]


Data = Annotated[Any, DataOf()]


Int32 = Annotated[Any, Scalar("int32")]


Uint32 = Annotated[Any, Scalar("uint32")]


Int64 = Annotated[Any, Scalar("int64")]


Constant = Annotated[int, ConstantInt()]


ConstantFlag = Annotated[bool, ConstantBool()]


Peer = Annotated[Any, TraceOnly()]


DtypeName = Annotated[str, TraceOnly()]


Level = Literal["thread", "warp", "block", "leader"]
"""Threads that execute a builtin: each thread that reaches it, a whole warp, the whole block, or
one elected thread of the block (``leader``)."""


Participants = Literal["", "grid", "ranks", "blocks"]
"""Participants of a barrier: all blocks of this launch on this GPU, one block of each rank, or all
blocks of all ranks."""


BulkGroup = Literal["", "commit", "wait"]
"""Effect on the groups of asynchronous stores of a thread: close a group, or wait for groups."""


Relation = Literal["", "eq", "ne", "ge", "gt", "le", "lt", "reached"]
"""Relation between a flag and the awaited value that ends a wait."""

RELATION_TEXT = {
    "eq": "==",
    "ne": "!=",
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "reached": "reached",
}
"""Relation -> its sign in texts, before the awaited value."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Roles of a builtin, as its declaration gives them.

    Passes, runtime and simulator read the roles; they identify no builtin by its name. Its operands
    say what it reads and writes; its qualifier ``sem`` says whether it releases or acquires.
    """

    types: tuple[str, ...] = ()
    """PTX types that the instruction supports, if it does not support all."""

    op_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """PTX types for one value of the qualifier ``op``, if they are fewer."""

    vectors: tuple[str, ...] = ()
    """PTX types that the instruction also supports as vectors of 2 and 4 (``.v2``, ``.v4``)."""

    implicit: tuple[str, ...] = ()
    """Operands that the compiler supplies after the declared ones; see ``implicit.py``."""

    level: Level = "thread"
    """Threads that execute it."""

    barrier_before: bool = False
    """Whether all threads of the block synchronize before it."""

    barrier_after: bool = False
    """Whether all threads of the block synchronize after it."""

    moves: str = ""
    """Operand that holds the number of elements that it copies from the operand it reads to the
    operand it writes. A builtin without this role only orders memory, or accesses one element."""

    combines: str = ""
    """Operation of an atomic change, such as ``add``, if no qualifier ``op`` names it and the
    builtin does not replace the element."""

    async_proxy: bool = False
    """Whether it accesses shared memory by the async proxy and returns before the access ends.
    Before the block synchronizes, every thread makes its own accesses visible to that proxy."""

    proxy_fence: bool = False
    """Whether it is a fence between ordinary accesses and those of the async proxy."""

    bulk_group: BulkGroup = ""
    """Whether it closes a group of asynchronous stores, or waits for groups. A wait has the
    operands ``n`` and ``read``."""

    participants: Participants = ""
    """Participants of a barrier. A barrier releases and acquires for the whole block."""

    waits: Relation = ""
    """Relation between a flag and the second operand that ends the wait. The wait guards the loads
    after it."""

    observes: bool = False
    """Whether it reads memory that other threads may change at the same time. Every builtin that
    waits, and every one with operands and a result, does."""

    announces: bool = False
    """Whether it announces rows of a ragged tensor. It writes the announcement of a segment, its
    first operand, and has the implicit operands ``total``, ``rows``, ``row_size`` and ``tile``."""

    checks: bool = False
    """Whether it only checks rows of a ragged tensor, in memory that nothing else uses."""

    no_effect: bool = False
    """Whether no result of a program depends on it: a sleep, a record, advice to a cache."""

    flagged: bool = False
    """Whether each 8-byte word that it accesses holds 4 bytes of data, and a flag that equals the
    operand ``flag``. A load polls for the flag."""

    uniform: bool = False
    """Whether its result is its operand, which is equal in all blocks of all ranks."""

    multicast: bool = False
    """Whether its first operand is an address of multicast memory."""

    sm: int = 80
    """First compute capability (80, 90, 100) that has the instruction."""

    type_sm: Mapping[str, int] = field(default_factory=dict)
    """First compute capability for single PTX types, if it is a later one."""


@dataclass(frozen=True, kw_only=True)
class Builtin(Roles):
    """One intrinsic, as declared.

    Attributes:
        operands: name and kind of each operand.
        qualifiers: name and legal values of each qualifier.
        result: kind of the result, or None.
        signature: signature of the function of the language.
        doc: the docstring, which is the manual.
    """

    name: str
    operands: tuple[tuple[str, Any], ...]
    qualifiers: tuple[tuple[str, tuple[str, ...]], ...]
    result: Any
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
        """Number of arguments of a call: operands, the PTX type if it has one, and qualifiers."""
        return len(self.operands) + len(self.implicit) + bool(self.types) + len(self.qualifiers)

    @property
    def text(self) -> str:
        """The builtin as a program writes it: ``W.signal``."""
        return f"W.{self.name}"

    @property
    def pointers(self) -> tuple[Pointer, ...]:
        """The operands that are addresses."""
        return tuple(kind for _, kind in self.operands if isinstance(kind, Pointer))

    @property
    def writes(self) -> bool:
        """True if it changes memory, so that repeating it changes memory again."""
        return any("w" in pointer.access for pointer in self.pointers)

    @property
    def loads(self) -> bool:
        """True if it returns the value of one element and changes nothing."""
        if self.writes or self.multicast or self.flagged:
            return False
        return bool(self.result and self.pointers)

    @property
    def polls(self) -> bool:
        """True if it waits for flags in words, and returns the data of these words."""
        return self.flagged and self.result is not None

    @property
    def fetches(self) -> bool:
        """True if it changes an element and returns the old value."""
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
        """Return the operation by which ``call`` changes memory.

        It is ``set`` for a plain store, the reduction's operation, such as ``add``, or "" if the
        call changes nothing.
        """
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
        """Return the numbers of elements that one access of this PTX type may cover."""
        lanes = PTX_TYPES[ptx][1]
        return (lanes, 2 * lanes, 4 * lanes) if ptx in self.vectors else (lanes,)

    def ptx_type(self, call: tirx.Call) -> str:
        """Return the PTX type that ``call`` was traced with, or ""."""
        return call.args[self.arity - len(self.qualifiers) - 1].value if self.types else ""

    def least_sm(self, call: tirx.Call) -> int:
        """Return the first compute capability that has the instruction of ``call``."""
        return self.type_sm.get(self.ptx_type(call), self.sm)


BUILTINS: dict[str, Builtin] = {}
"""Every builtin, by op name."""


def builtin_of(node: Any) -> Builtin | None:
    """Return the declaration of the builtin that an IR node calls, or None for other nodes."""
    if isinstance(node, tirx.Call) and isinstance(node.op, tvm.ir.Op):
        return BUILTINS.get(node.op.name)
    return None


def declaration_of(function: Callable[..., tirx.PrimExpr]) -> Builtin:
    """Return the declaration of a function of the language, such as ``W.signal``."""
    return BUILTINS[f"tileweave.{function.__name__}"]


# A list, because the first failing Op.get of a process takes 400 ms for its C++ backtrace.
_OPS = set(tvm.ir.Op.list_op_names())


def register_op(name: str, doc: str, num_inputs: int, printed: str = "") -> None:
    """Register an opaque TIR operator once; a second call is a no-op.

    Args:
        printed: its name after ``T.`` in a script; by default ``name``.
    """
    if name in _OPS:
        return
    _OPS.add(name)
    tvm.ir._ffi_api.RegisterOp(name, doc)
    op = tvm.ir.Op.get(name)
    op.set_num_inputs(num_inputs)
    op.set_attr("TCallEffectKind", tirx.CallEffectKind.Opaque)
    op.set_attr("TScriptPrinterName", printed or name)
