"""Effects of a statement of a device function on shared memory and on the order of its threads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm import DataType, tirx

from ....builtins.spec import Builtin, Pointer, builtin_of
from ..memory_order import releases
from ..origin import ORIGIN
from ..walk import (
    EXPECTS,
    MBARRIER_WAIT,
    TMA_LOADS,
    TMA_STORES,
    calls_in,
    op_name,
    variables_in,
)
from .values import ThreadValues

READ, WRITE, ATOMIC = 1, 2, 4
SHARED = ("shared", "shared.dyn")
COPY, BULK, LOAD, PRODUCT = "cp.async", "bulk store", "bulk load", "wgmma"
"""Asynchronous operations, which end with a wait."""
ONLY_IF = "tileweave.only_if"
_COMPLETE = "tileweave.complete_bulk_stores"
_ARRIVALS = frozenset(
    {
        "tirx.ptx_arrive_barrier", "tl.ptx_arrive_barrier", "tirx.ptx_arrive_barrier_expect_tx",
        "tl.ptx_cp_async_barrier_noinc",
    }
)  # fmt: skip
_COMMITS = {
    "tirx.ptx_commit_group": COPY,
    "tl.tma_store_arrive": BULK,
    "tl.warpgroup_commit_batch": PRODUCT,
}
_WAITS = {"tirx.ptx_wait_group": COPY, "tl.warpgroup_wait": PRODUCT, "tl.wait_wgmma": PRODUCT}
_BLOCK_BARRIERS = frozenset(
    {"tl.syncthreads_and", "tl.syncthreads_or", "tl.syncthreads_count", "tl.sync_grid",
     "tl.cluster_sync"}
)  # fmt: skip
_REDUCTION = re.compile(
    r"tl::AllReduce<[^>]*?, (\d+), (\d+), \d+(?:, tl::(?:SyncThreadsBarrier|NamedBarrier<(\d+)>))?"
)
_ATOMIC = re.compile(r"tomic_?(add|max|min|or|load)?(?:x\d)?(_?ret)?", re.IGNORECASE)
_OPERANDS = (
    "a", "b", "condition", "true_value", "false_value", "base", "stride", "value", "body",
)  # fmt: skip
_EXITS = ("tl.loop_break", "tirx.break_loop", "tirx.continue_loop", "tirx.thread_return")


_INIT = "tirx.ptx_init_barrier_thread_count"
_ZERO = tirx.IntImm("int32", 0)
_SYNC_THREADS = "T.sync_threads"
REDUCE = "T.reduce or T.finalize_reducer"
"""Names of operations with barriers, for messages."""


@dataclass(frozen=True)
class Access:
    """An access of shared memory by each thread that executes it.

    Attributes:
        pointer: the first element, as a BufferLoad, BufferStore or a call that returns an address.
        mode: ``READ``, ``WRITE`` and ``ATOMIC``.
        bytes: number of bytes from the first one on; None for those of ``pointer`` itself.
        end: operation whose wait ends the access; "" if it ends with the statement.
        barrier: mbarrier that a bulk load completes on.
        by_warp: whether all threads of a warp make the accesses of all of them.
        lanes: number of the lanes whose addresses count.
        in_call: whether a function makes the access, which orders all of its own accesses.
        product: shape of an operand of ``wgmma``.
        condition: condition of ``only_if`` under which a bulk load happens.
        op: operation of an atomic access, if the order of equal ones does not matter.
        target: buffer, first index and number of the elements that a bulk store overwrites.
    """

    pointer: Any
    mode: int
    bytes: int | None = None
    end: str = ""
    barrier: Any = None
    by_warp: bool = False
    lanes: int = 32
    in_call: bool = False
    product: Operand | None = None
    condition: tirx.PrimExpr | None = None
    op: str = ""
    target: tuple[tirx.Var, tirx.PrimExpr, tirx.PrimExpr] | None = None


@dataclass(frozen=True)
class Operand:
    """Operand of ``wgmma`` in shared memory.

    Attributes:
        offset: expression of its distance from the address of the descriptor, in 16 bytes.
        extent, depth: number of its rows or columns, and of the products of each; in elements.
        itemsize: bytes of an element.
        k_major: whether elements of one product are neighbors.
    """

    offset: tirx.PrimExpr
    extent: int
    depth: int
    itemsize: int
    k_major: bool


@dataclass(frozen=True)
class Barrier:
    """``bar.sync``: of all threads of the block, or of ``count`` threads at barrier ``number``.

    Attributes:
        number: None if the number or the count is not a constant.
        op: name of the operation whose barrier it is; "" if TileLang inserts it.
    """

    end: ClassVar[str] = ""

    number: int | None = 0
    count: int | None = None
    op: str = ""


@dataclass(frozen=True)
class SyncWarp:
    """A barrier of each warp."""


@dataclass(frozen=True)
class Arrive:
    """An arrival at an mbarrier, which publishes what the threads know.

    Attributes:
        expects: whether the phase also waits for the bytes of loads that follow.
    """

    barrier: Any
    expects: bool = False


@dataclass(frozen=True)
class Await:
    """A wait for the phase of an mbarrier with a parity."""

    barrier: Any
    parity: tirx.PrimExpr


@dataclass(frozen=True)
class Commit:
    """The end of a group of asynchronous operations."""

    kind: str


@dataclass(frozen=True)
class Complete:
    """A wait for all but the newest ``pending`` groups of asynchronous operations."""

    kind: str
    pending: tirx.PrimExpr


@dataclass(frozen=True)
class Describe:
    """A change of a matrix descriptor: its address and layout, or a distance in bytes."""

    descriptor: tirx.Var
    call: tirx.Call


@dataclass(frozen=True)
class Exit:
    """The end of an iteration, a loop or the function for the threads that execute it.

    Attributes:
        name: the operator.
    """

    name: str


@dataclass(frozen=True)
class Use:
    """An access of global memory, or a wait for a flag that the kernel clears.

    Attributes:
        data: the buffer of which each thread accesses elements; None for other accesses.
        mode: as in ``Access``.
        op: operation of an atomic access that returns nothing, if the order of equal ones does not
            matter.
    """

    end: ClassVar[str] = ""

    data: tirx.Var | None = None
    mode: int = 0
    op: str = ""


@dataclass(frozen=True)
class Publish:
    """A release: it publishes what other threads of the block did before."""


Ordering = Barrier | SyncWarp | Arrive | Await | Commit | Complete
Effect = Access | Ordering | Describe | Exit | Use | Publish


def effects_of(node: Any, cleared: set[tirx.Var]) -> list[Effect]:
    """Return the effects of a leaf statement, or of an expression, in order.

    Args:
        cleared: variables of the buffers that the kernel stores to; a flag among them is cleared.
    """
    collector = _Collector(cleared)
    if isinstance(node, tirx.BufferStore):
        for expr in (*node.indices, node.value):
            collector.visit(expr)
        collector.element(node, WRITE)
    elif isinstance(node, tirx.Evaluate | tirx.Bind):
        collector.visit(node.value)
    elif not isinstance(node, tirx.Stmt):
        collector.visit(node)
    return collector.effects


def commute(a: Access | Use, b: Access | Use) -> bool:
    """Return whether the order of two accesses of one element does not matter."""
    modes = a.mode | b.mode
    return modes == READ or (modes == ATOMIC and a.op == b.op != "")


def orders_threads(effects: Iterable[Effect]) -> bool:
    """Return whether one of the effects changes what is ordered."""
    return not all(isinstance(effect, Access | Use) for effect in effects)


class _Collector:
    def __init__(self, cleared: set[tirx.Var]) -> None:
        self.effects: list[Effect] = []
        self._cleared = cleared

    def visit(self, expr: Any) -> None:
        """Add the effects of an expression, operands first."""
        if isinstance(expr, tirx.BufferLoad):
            for index in expr.indices:
                self.visit(index)
            self.element(expr, READ)
        elif isinstance(expr, tirx.Call):
            self._call(expr)
        else:
            for operand in _operands(expr):
                self.visit(operand)

    def element(self, node: Any, mode: int) -> None:
        scope = node.buffer.scope()
        if scope in SHARED:
            self.effects.append(Access(node, mode))
        elif scope == "global":
            self.effects.append(Use(node.buffer.data, mode))

    def _call(self, call: tirx.Call) -> None:
        name, spec = op_name(call), builtin_of(call)
        if name in ("tirx.tvm_access_ptr", "tirx.address_of", "tirx.handle_add_byte_offset"):
            return  # the operator around it accesses memory
        if spec is not None:
            self._builtin(call, spec)
        elif name == "tirx.tvm_storage_sync":
            self._sync(call)
        elif name in _BLOCK_BARRIERS:
            self.effects.append(Barrier(op=_SYNC_THREADS))
        elif name == "tl.sync_warp":
            self.effects.append(SyncWarp())
        elif name in _ARRIVALS:
            if name.endswith("noinc"):
                self.effects.append(Complete(COPY, _ZERO))
            self.effects.append(Arrive(call.args[0], name in EXPECTS))
        elif name == MBARRIER_WAIT:
            self.effects.append(Await(*call.args[:2]))
        elif name in _COMMITS:
            self.effects.append(Commit(_COMMITS[name]))
        elif name in _WAITS:
            self.effects.append(Complete(_WAITS[name], call.args[0] if call.args else _ZERO))
        elif name in ("tl.tma_store_wait", _COMPLETE):
            pending = call.args[0] if call.args else _ZERO
            self.effects += [Commit(BULK)] if name == _COMPLETE else []
            self.effects.append(Complete(BULK, pending))
        elif name in _EXITS:
            self.effects.append(Exit(name))
        elif not self._copies(call, name) and not self._tensor_core(call, name):
            self._other(call, name)

    def _sync(self, call: tirx.Call) -> None:
        scope = call.args[0].value
        if scope == "warp":
            self.effects.append(SyncWarp())
            return
        op = "" if scope == "shared.dyn" else _SYNC_THREADS
        operands = call.args[1:]
        if all(isinstance(operand, tirx.IntImm) for operand in operands):
            self.effects.append(Barrier(*map(int, operands), op=op))
        else:
            self.effects.append(Barrier(None, op=op))

    def _copies(self, call: tirx.Call, name: str) -> bool:
        """Add the effects of a copy by the TMA or by ``cp.async``; return whether it is one."""
        described = bool(call.args) and isinstance(call.args[0], tirx.Var)
        if name in TMA_LOADS:
            barrier, target = (call.args[1:3]) if described else (call.args[2], call.args[0])
            only = calls_in(call, lambda c: op_name(c) == ONLY_IF)
            condition = only[0].args[0] if only else None
            self._pointer(target, WRITE, end=LOAD, barrier=barrier, condition=condition)
        elif name in TMA_STORES:
            self._pointer(call.args[1], READ, end=BULK)
        elif name == "tl.ptx_cp_async":
            size = int(call.args[2]) * _itemsize(call.args[0])
            self._pointer(call.args[0], WRITE, bytes=size, end=COPY)
        else:
            return False
        return True

    def _tensor_core(self, call: tirx.Call, name: str) -> bool:
        """Add the effects of an instruction of the tensor cores; return whether it is one."""
        if name in ("tl.ptx_ldmatrix", "tl.ptx_stmatrix"):
            mode, lanes = (READ, WRITE)[name == "tl.ptx_stmatrix"], 8 * int(call.args[1])
            self._pointer(call.args[2], mode, bytes=16, by_warp=True, lanes=lanes)
        elif name in ("tl.initialize_wgmma_descriptor", "tl.increase_descriptor_offset"):
            self.effects.append(Describe(call.args[0].buffer.data, call))
        elif name == "tl.ptx_wgmma_ss":
            m, n, k = _shape(call.args[0].value)
            self._operand(call.args[6:8], m, k, call.args[1], call.args[3])
            self._operand(call.args[8:10], n, k, call.args[2], call.args[4])
        elif name == "tl.ptx_wgmma_rs":
            _, n, k = _shape(call.args[0].value)
            self._operand(call.args[7:9], n, k, call.args[1], call.args[3])
        else:
            return name == "tirx.ptx_mma"  # registers only
        return True

    def _operand(self, pointer: Any, extent: int, depth: int, k_major: Any, dtype: Any) -> None:
        descriptor, offset = pointer
        bits = re.search(r"\d+", dtype.value.replace("e4m3", "8").replace("e5m2", "8"))
        itemsize = max(1, int(bits[0]) // 8) if bits else 2
        itemsize = 4 if dtype.value == "tf32" else itemsize
        operand = Operand(offset, extent, depth, itemsize, bool(int(k_major)))
        self.effects.append(Access(descriptor, READ, end=PRODUCT, by_warp=True, product=operand))

    def _builtin(self, call: tirx.Call, spec: Builtin) -> None:
        pointers = _pointers(call, spec)
        barrier = next((a for kind, a in pointers if kind.space == "barrier"), None)
        overwrites = spec.is_async_store and not spec.has_qualifier("op")
        target = (*_element_of(call.args[0]), call.args[2]) if overwrites else None
        for kind, argument in pointers:
            if kind.space != "shared":
                continue
            mode = READ * ("r" in kind.access) | WRITE * ("w" in kind.access)
            end = LOAD if spec.is_async_load else BULK if spec.is_async_store else ""
            self._pointer(argument, mode, end=end, barrier=barrier, target=target)
        for argument in call.args:
            self.visit(argument)
        if spec.participants:
            self.effects += [Barrier(op=_SYNC_THREADS)] if spec.level == "block" else []
        if spec.bulk_group == "commit":
            self.effects.append(Commit(BULK))
        elif spec.bulk_group == "wait":
            self.effects.append(Complete(BULK, call.args[0]))
        if spec.waits and self._cleared.intersection(variables_in(call)):
            self.effects.append(Use())
        if releases(call):
            self.effects.append(Publish())
        synchronizes = spec.level == "leader" or spec.waits or spec.flagged
        if synchronizes or spec.no_effect or spec.checks or ORIGIN in call.annotations:
            return  # the compiler orders the calls that it inserts
        op = "" if spec.fetches else spec.combination(call)
        for kind, argument in pointers:
            mode = {"r": READ, "w": WRITE, "rw": ATOMIC}[kind.access]
            if kind.space == "global":
                self.effects.append(Use(data_of(argument), mode, op if mode == ATOMIC else ""))

    def _other(self, call: tirx.Call, name: str) -> None:
        """Add the effects of another call: it may access what its operands point to."""
        callee = call.args[0].value if name.endswith("_extern") else name
        reduction = _REDUCTION.match(callee)
        atomic = _ATOMIC.search(callee)
        op = (atomic[1] or "").lower() if atomic is not None else ""
        pointers = [a for a in call.args if _scope_of(a) in SHARED]
        for argument in call.args:
            self.visit(argument)
        if reduction is not None:
            self._reduce(reduction, pointers)
            return
        for pointer in call.args:
            mode = ATOMIC if atomic is not None else _mode_of(pointer)
            self._pointer(pointer, mode, in_call=True, op=op)
            if _scope_of(pointer) == "global":
                order = "" if atomic is not None and atomic[2] else op
                self.effects.append(Use(data_of(pointer), mode, order))

    def _reduce(self, reduction: re.Match, pointers: list[Any]) -> None:
        """Add the effects of a reduction between warps, whose threads meet before both steps."""
        threads, scale = int(reduction[1]), int(reduction[2])
        if threads // 2 < max(32, scale):
            return
        count = int(reduction[3]) if reduction[3] else None
        self.effects.append(Barrier(1 if count else 0, count, op=REDUCE))
        for mode in (WRITE, READ):
            for pointer in pointers:
                self._pointer(pointer, mode)
            if mode == WRITE:
                self.effects.append(Barrier(2 if count else 0, count, op=REDUCE))

    def _pointer(self, pointer: Any, mode: int, **attributes: Any) -> None:
        if _scope_of(pointer) in SHARED:
            self.effects.append(Access(pointer, mode, **attributes))


def _pointers(call: tirx.Call, spec: Builtin) -> list[tuple[Pointer, tirx.Call]]:
    operands = ((kind, a) for (_, kind), a in zip(spec.operands, call.args, strict=False))
    return [(k, a) for k, a in operands if isinstance(k, Pointer) and isinstance(a, tirx.Call)]


def _operands(expr: Any) -> list[Any]:
    """Return the operands of an expression that is neither a call nor a load."""
    if isinstance(expr, tirx.Shuffle):
        return list(expr.vectors)
    operands = (getattr(expr, name, None) for name in _OPERANDS)
    return [operand for operand in operands if isinstance(operand, tirx.PrimExpr)]


def data_of(pointer: Any) -> tirx.Var | None:
    """Return the variable that points to the buffer of a pointer, or None."""
    name = op_name(pointer)
    if name == "tirx.tvm_access_ptr":
        return pointer.args[1]
    if name == "tirx.address_of":
        return pointer.args[0].buffer.data
    if name == "tirx.handle_add_byte_offset":
        inner = pointer.args[0]
        return data_of(inner) if isinstance(inner, tirx.Call) else inner
    return pointer.buffer.data if hasattr(pointer, "buffer") else None


def mbarrier_sizes(func: tirx.PrimFunc, values: ThreadValues) -> dict[tuple[tirx.Var, int], int]:
    """Return the number of arrivals of a phase of each mbarrier, by buffer and index. Mbarriers of
    which it is unknown are left out."""
    sizes = {}
    for call in calls_in(func.body, lambda call: op_name(call) == _INIT):
        data, first = mbarrier_of(call.args[0])
        index, size = map(values.constant, (first, call.args[1]))
        if index is not None and size:
            sizes[data, index] = size
    return sizes


def mbarrier_of(barrier: Any) -> tuple[tirx.Var, tirx.PrimExpr]:
    """Return buffer and index of an mbarrier."""
    return _element_of(barrier)


def _element_of(pointer: Any) -> tuple[tirx.Var, tirx.PrimExpr]:
    """Return buffer and index of the element that a pointer or a load names."""
    if op_name(pointer) == "tirx.tvm_access_ptr":
        return pointer.args[1], pointer.args[2]
    node = pointer.args[0] if isinstance(pointer, tirx.Call) else pointer
    return node.buffer.data, node.indices[0]


def _scope_of(node: Any) -> str:
    """Return the scope of the memory that a pointer points to, or ""."""
    data = data_of(node) if isinstance(node, tirx.Call) else None
    return getattr(getattr(data, "type_annotation", None), "storage_scope", "")


def _mode_of(pointer: Any) -> int:
    if op_name(pointer) == "tirx.tvm_access_ptr" and isinstance(pointer.args[4], tirx.IntImm):
        return int(pointer.args[4]) or READ | WRITE
    return READ | WRITE


def _itemsize(pointer: tirx.Call) -> int:
    return max(1, DataType(str(pointer.args[0].dtype)).bits // 8)


def _shape(text: str) -> tuple[int, int, int]:
    m, n, k = map(int, re.fullmatch(r"m(\d+)n(\d+)k(\d+)", text).groups())
    return m, n, k
