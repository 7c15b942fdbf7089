"""Synchronization operations of a program at one level, and edits of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.memory import fence_proxy_async
from ...builtins.spec import Builtin, Pointer, builtin_of, declaration_of
from ...passes.ir.accesses import READS, WRITES, touches_in
from ...passes.ir.implicit import implicit_of
from ...passes.ir.memory_order import acquires, releases
from ...passes.ir.operators import COMPLETE
from ...passes.ir.spans import get_stmt_span, set_stmt_span
from ...passes.ir.walk import calls_in, children_of, flatten, op_name, rewrite_children

Edit = Callable[[tirx.Stmt], tirx.Stmt]
"""Edits the body of a program."""


@dataclass(frozen=True)
class Instructions:
    """Operations of one level that mutations change.

    Attributes:
        names: operations of TileLang that synchronize, with their names in programs.
        async_proxy: whether the simulator models the async proxy at this level.
    """

    names: Mapping[str, str]
    async_proxy: bool = False

    def synchronizes(self, call: tirx.Call) -> bool:
        """Return whether ``call`` orders threads, blocks or ranks."""
        spec = builtin_of(call)
        if spec is None:
            return op_name(call) in self.names
        if spec.proxy_fence:
            return self.async_proxy
        only_orders = spec.result is None and not any(
            isinstance(k, Pointer) and not k.optional for _, k in spec.operands
        )
        orders = only_orders or spec.signals or releases(call) or acquires(call)
        return bool(spec.waits) or spec.announces or spec.flagged or orders

    def has(self, call: tirx.Call) -> bool:
        """Return whether ``call`` synchronizes or has a scope."""
        spec = builtin_of(call)
        return self.synchronizes(call) or (spec is not None and spec.has_qualifier("scope"))

    def name(self, call: tirx.Call) -> str:
        spec = builtin_of(call)
        return spec.name if spec is not None else self.names[op_name(call)]


_SHARED_NAMES = {
    "tirx.tvm_storage_sync": "sync_threads",
    "tl.mbarrier_wait_parity": "mbarrier_wait_parity",
    "tl.ptx_arrive_barrier": "mbarrier_arrive",
    "tirx.ptx_arrive_barrier": "mbarrier_arrive",
    "tl.tma_store_wait": "tma_store_wait",
    "tl.tma_store_arrive": "tma_store_arrive",
    COMPLETE: "complete_bulk_stores",
}
TILE = Instructions(_SHARED_NAMES)
"""Operations of a program after the tile passes."""
DEVICE = Instructions(
    {
        **_SHARED_NAMES,
        "tl.sync_warp": "sync_warp",
        "tl.fence_proxy_async": declaration_of(fence_proxy_async).name,
        "tl.ptx_fence_barrier_init": "mbarrier_init_fence",
        "tirx.ptx_init_barrier_thread_count": "mbarrier_init",
        "tirx.ptx_arrive_barrier_expect_tx": "mbarrier_arrive_expect_tx",
        "tl.mbarrier_expect_tx": "mbarrier_expect_tx",
        "tirx.ptx_commit_group": "cp_async_commit",
        "tirx.ptx_wait_group": "cp_async_wait",
        "tl.warpgroup_arrive": "wgmma_fence",
        "tl.warpgroup_commit_batch": "wgmma_commit",
        "tl.warpgroup_wait": "wgmma_wait",
    },
    async_proxy=True,
)
"""Operations of a device function."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One call that synchronizes, or that has a ``scope`` qualifier."""

    call: tirx.Call
    stmt: tirx.Stmt
    """Innermost statement around the call."""
    kind: str
    """Its name in programs."""
    file: str
    line: int
    synchronizes: bool
    number: int = 1
    """Number among the operations of this kind of one statement, in a device function."""

    @property
    def name(self) -> str:
        return self.kind if self.number == 1 else f"{self.kind}#{self.number}"

    @property
    def spec(self) -> Builtin | None:
        return builtin_of(self.call)

    @property
    def is_statement(self) -> bool:
        """True if the call is a statement, so that its result is unused."""
        return isinstance(self.stmt, tirx.Evaluate) and self.call.same_as(self.stmt.value)

    def operand(self, kind: type) -> int | None:
        """Return the position of the first operand of this kind."""
        for place, (_, found) in enumerate(self.spec.operands if self.spec else ()):
            if isinstance(found, kind):
                return place
        return None

    def pointer(self) -> tirx.BufferLoad | None:
        """Return the element on which the call operates, or None in a device function."""
        node = self._pointer()
        return node.args[0] if op_name(node) == "tl.access_ptr" else None

    def flag(self) -> str:
        """Return the name of the tensor on which the call operates, or nothing."""
        node, at = self._pointer(), self.pointer()
        if at is not None:
            return at.buffer.name
        return node.args[1].name if op_name(node) == "tirx.tvm_access_ptr" else ""

    def _pointer(self) -> tirx.PrimExpr | None:
        place = self.operand(Pointer)
        return self.call.args[place] if place is not None else None


def operations(body: tirx.Stmt, instructions: Instructions) -> list[Operation]:
    """Return all operations in the order of the program."""
    collected: list[Operation] = []

    def note(stmt: tirx.Stmt, node: tirx.PrimExpr, place: tuple[str, int]) -> None:
        for call in calls_in(node, instructions.has):
            synchronizes = instructions.synchronizes(call)
            collected.append(Operation(call, stmt, instructions.name(call), *place, synchronizes))

    def walk(stmt: tirx.Stmt, place: tuple[str, int]) -> tirx.Stmt:
        place = _place(stmt) or place
        if isinstance(stmt, tirx.SeqStmt):
            # An inserted operation precedes the statement that it serves and has its line.
            places = [[*places_in(s)] for s in stmt.seq]
            for i, inner in enumerate(stmt.seq):
                before = next((p[-1] for p in reversed(places[:i]) if p), place)
                walk(inner, next((p[0] for p in places[i:] if p), before))
        elif isinstance(stmt, (tirx.Evaluate, tirx.Bind, tirx.BufferStore)):
            note(stmt, stmt.value, place)
        else:
            if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
                note(stmt, stmt.condition, place)
            rewrite_children(stmt, lambda s: walk(s, place))
        return stmt

    walk(body, ("", 0))
    return collected


def places_in(stmt: tirx.Stmt) -> Iterator[tuple[str, int]]:
    """Yield file and line of each statement in ``stmt`` that has them, outer ones first."""
    place = _place(stmt)
    if place is not None:
        yield place
    for inner in children_of(stmt):
        yield from places_in(inner)


def _place(stmt: tirx.Stmt) -> tuple[str, int] | None:
    span = get_stmt_span(stmt)
    return None if span is None else (str(span.source_name.name), int(span.line))


def replaced(call: tirx.Call, new: tirx.PrimExpr) -> Edit:
    """Return an edit that replaces a call."""

    def post(node):
        return new if node.same_as(call) else None

    return lambda body: ir_transform(body, None, post, ["tirx.Call"])


def instead(stmt: tirx.Stmt, *new: tirx.Stmt) -> Edit:
    """Return an edit that replaces a statement by others, or removes it."""

    def edit(at: tirx.Stmt) -> tirx.Stmt:
        if at.same_as(stmt):
            return flatten(list(new)) if new else tirx.Evaluate(tirx.IntImm("int32", 0))
        return rewrite_children(at, edit)

    return edit


def sequences_around(body: tirx.Stmt, stmt: tirx.Stmt) -> list[tuple[tirx.SeqStmt, int]]:
    """Return the sequences that contain ``stmt``, innermost first, each with its element there."""
    out: list[tuple[tirx.SeqStmt, int]] = []

    def contains(at: tirx.Stmt) -> bool:
        found = at.same_as(stmt)
        if isinstance(at, tirx.SeqStmt):
            for i, inner in enumerate(at.seq):
                if contains(inner):
                    out.append((at, i))
                    return True
            return found

        def look(inner):
            nonlocal found
            found = found or contains(inner)
            return inner

        rewrite_children(at, look)
        return found

    contains(body)
    return out


class Accesses:
    """Accesses of statements to data in global memory, without flags."""

    def __init__(self, func: tirx.PrimFunc, written: set[tirx.Var]) -> None:
        counts = {p.name for p in implicit_of(func) if not p.symmetric}
        self._tensors = {b.data for b in func.buffer_map.values() if b.name not in counts}
        self._written = written

    def writes(self, stmt: tirx.Stmt) -> bool:
        return any(mode & WRITES for _, mode in self._in(stmt))

    def reads(self, stmt: tirx.Stmt) -> bool:
        """Return whether ``stmt`` reads a tensor that the program writes; others need no order."""
        return any(mode & READS and data in self._written for data, mode in self._in(stmt))

    def _in(self, stmt: tirx.Stmt) -> list[tuple[tirx.Var, int]]:
        specs = [(call, builtin_of(call)) for call in calls_in(stmt, TILE.synchronizes)]
        flags = {a for call, spec in specs if spec is None or not spec.announces for a in call.args}
        return [
            (buffer.data, mode)
            for node, buffer, mode in touches_in(stmt)
            if buffer.data in self._tensors and node not in flags
        ]


def distinct(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` with a node of its own for each operation, because lowering may repeat one
    node and an edit changes all its places."""

    def copy(stmt: tirx.Stmt) -> tirx.Stmt:
        if not isinstance(stmt, tirx.Evaluate) or not isinstance(stmt.value, tirx.Call):
            return rewrite_children(stmt, copy)
        new = tirx.Evaluate(with_operands(stmt.value, stmt.value.args))
        if (span := get_stmt_span(stmt)) is not None:
            set_stmt_span(new, span)
        return new

    return func.with_body(copy(func.body))


def with_operands(call: tirx.Call, operands: Iterable[tirx.PrimExpr]) -> tirx.Call:
    """Return the call with other operands."""
    return tirx.Call(call.dtype, call.op, list(operands), annotations=call.annotations)
