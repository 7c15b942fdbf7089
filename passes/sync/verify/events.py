"""Every access, signal, wait and barrier of a program, with its place in the program's order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tvm import tirx

from ....builtins.spec import BUILTINS, Builtin, Participants, builtin_of
from ...ir.memory_order import acquires
from ...ir.walk import arrows, builtins_in, calls_in, format_expr, line_of, nodes_in, op_name
from ..regions.accesses import AccessCollector, Program
from ..regions.space import Loop
from .async_loads import AsyncLoads

EventKind = Literal["read", "write", "add", "signal", "wait", "fence", "barrier"]
DATA = ("read", "write", "add")


@dataclass(frozen=True, eq=False)
class Event:
    """One access, signal, wait, fence or barrier.

    Attributes:
        op: the builtin, such as ``W.signal``, or TileLang's operator.
        starts, extents: box of an access, or index of a flag or of the words of a barrier; empty
            for fences and for barriers without words of the program.
        loops: loops around the event, block axes first, then the thread axes that it depends on.
        conditions: conditions that all hold when the event happens.
        serial_loops: (number, variable) of each serial loop around the event; numbers count
            statements in the order of the program.
        number: number of the event's own statement.
        line: ``file:line``, or an empty string.
        grid: block axes of the kernel.
        kernel: number of the kernel in the program.
        scope, sem: PTX qualifiers of the operation.
        value: value that is added, stored or awaited.
        adds: whether the value is added to the flag instead of stored.
        relation: relation between the flag and the awaited value that ends the wait.
        participants: participants of a barrier.
        by_last: whether only the last block to arrive at an atomic addition executes the event.
        load_end_op, load_end_line: for the end of an asynchronous load, the name and the line of
            the operation that waits for it.
    """

    kind: EventKind
    op: str
    tensor: tirx.Buffer | None
    starts: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]
    loops: tuple[Loop, ...]
    conditions: tuple[tirx.PrimExpr, ...]
    serial_loops: tuple[tuple[int, tirx.Var], ...]
    number: int
    line: str
    grid: tuple[Loop, ...]
    kernel: int
    scope: str = "sys"
    sem: str = ""
    value: tirx.PrimExpr | None = None
    adds: bool = False
    relation: str = ""
    participants: Participants = ""
    by_last: bool = False
    load_end_op: str = ""
    load_end_line: str = ""

    @property
    def labelled_lines(self) -> tuple[tuple[str, str], ...]:
        """Labelled lines for ``arrows``: the event, and the end of an asynchronous load."""
        return (self.kind, self.line), ("end of the load", self.load_end_line)

    @property
    def location(self) -> str:
        return arrows(self.labelled_lines)

    @property
    def element(self) -> str:
        """The element, as in ``S[dst, row, 0]``, or the name of the operation."""
        if self.tensor is None:
            return self.op
        return f"{self.tensor.name}[{', '.join(map(format_expr, self.starts))}]"

    @property
    def text(self) -> str:
        """The event for messages, as in ``T.copy writes S[dst, row, 0]``."""
        verbs = {"read": "reads", "write": "writes", "add": "adds to"}
        verb = verbs.get(self.kind)
        return f"{self.op} {verb} {self.element}" if verb else self.call_text

    @property
    def call_text(self) -> str:
        """The operation as a call, as in ``W.signal(flags[peer, 0])``."""
        return f"{self.op}({self.element if self.tensor is not None else ''})"


def collect_events(
    func: tirx.PrimFunc, tensors: Iterable[tirx.Buffer]
) -> tuple[Program, list[Event]]:
    """Return the program, and its events in the order of its statements."""
    collector = _EventCollector({t.data: t for t in tensors})
    collector.visit(func.body)
    return collector.program, collector.events


class _EventCollector(AccessCollector):
    def __init__(self, tensors: dict[tirx.Var, tirx.Buffer]) -> None:
        super().__init__(tensors)
        self.events: list[Event] = []
        self._number, self._kernel = 0, -1
        self._serial_loops: list[tuple[int, tirx.Var]] = []
        self._leaf_stmt: tirx.Stmt | None = None
        self._loads = AsyncLoads()

    def visit(self, stmt: tirx.Stmt) -> None:
        if not isinstance(stmt, tirx.SeqStmt):
            self._number += 1
        if isinstance(stmt, tirx.While):
            self._add_polls(stmt)
        super().visit(stmt)

    def _enter_kernel(self, stmt: tirx.For) -> None:
        self._kernel += 1
        self.program.grid, self.program.threads = [], []

    def _visit_loop(self, stmt: tirx.For) -> None:
        parallel = (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED)
        serial = stmt.thread_binding is None and stmt.kind not in parallel
        if serial:
            self._serial_loops.append((self._number, stmt.loop_var))
        with self._loads.within(stmt):
            super()._visit_loop(stmt)
        if serial:
            self._serial_loops.pop()

    def _visit_branch(self, stmt: tirx.IfThenElse) -> None:
        """Record a wait if the condition tests the result of an acquiring atomic operation.

        A block that takes the branch comes after the releases that the atomic operation observes.
        """
        atomic = self._atomic_in(stmt.condition)
        if atomic is not None and acquires(atomic):
            scope = builtin_of(atomic).qualifier(atomic, "scope")
            self._conditions.append(stmt.condition)
            name = builtin_of(atomic).text
            self._add_event("wait", name, atomic, stmt, scope=scope, sem="acquire")
            self._conditions.pop()
        super()._visit_branch(stmt)

    def _by_last(self) -> bool:
        return any(
            not isinstance(c, tirx.Not) and self._atomic_in(c) is not None for c in self._conditions
        )

    def _atomic_in(self, condition: tirx.PrimExpr) -> tirx.Call | None:
        """Return the atomic operation whose result ``condition`` uses, if any."""
        condition, values = self._resolve(condition), self.program.values
        bound = [values[v] for v in self.program.dependencies([condition]) if v in values]
        calls = (call for expr in (condition, *bound) for call in builtins_in(expr))
        return next((call for call in calls if builtin_of(call).fetches), None)

    def _add_access(self, kind, op, node, extents=None) -> None:
        count = len(self.program.accesses)
        super()._add_access(kind, op, node, extents)
        for a in self.program.accesses[count:]:
            self.events.append(Event(
                a.kind, a.op, a.tensor, a.starts, a.extents, (*a.loops, *a.inner), a.conditions,
                tuple(self._serial_loops), self._number, self._line_of(self._leaf_stmt),
                tuple(self.program.grid), self._kernel,
                by_last=self._by_last(),
            ))  # fmt: skip

    def _visit_leaf(self, stmt: tirx.Stmt) -> None:
        self._leaf_stmt = stmt
        for event, wait_name in self._loads.ended_by(stmt):
            self._add_load_end(event, wait_name, self._line_of(stmt))
        count = len(self.events)
        super()._visit_leaf(stmt)
        self._loads.begin(stmt, [e for e in self.events[count:] if e.kind == "read"])
        for call in builtins_in(stmt):
            self._add_sync(call, BUILTINS[call.op.name], stmt)
        for call in calls_in(stmt, lambda c: op_name(c) == "tl.sync_grid"):
            self._add_event("barrier", "T.sync_grid", call, stmt, scope="gpu", participants="grid")

    def _add_load_end(self, load: Event, wait_name: str, line: str) -> None:
        """Record a second read at the statement that waits for an asynchronous load.

        The load reads from its own statement until this one. An access that is ordered with both
        reads is ordered with the whole load.
        """
        pairs = zip(load.serial_loops, self._serial_loops, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        inner = self._serial_loops[shared:]
        number = inner[0][0] if inner else self._number
        serial_loops = load.serial_loops[:shared]
        self.events.append(replace(
            load, serial_loops=serial_loops, number=number,
            load_end_op=wait_name, load_end_line=line,
        ))  # fmt: skip

    def _add_polls(self, stmt: tirx.While) -> None:
        """Record a wait for each flag that a loop polls until its condition fails.

        The loop loads the flag, or changes it by an operation that returns its old value. It is a
        polling loop, or it acquires a lock.
        """
        for call, result in _polled(stmt):
            spec = builtin_of(call)
            sem = spec.qualifier(call, "sem")
            self._add_event(
                "wait", spec.text, call, stmt,
                scope="sys" if sem == "volatile" else spec.qualifier(call, "scope"),
                sem="acquire" if acquires(call) else sem,
                value=_bound(stmt.condition, result) if spec.loads else None,
                relation="reached",
            )  # fmt: skip

    def _add_sync(self, call: tirx.Call, spec: Builtin, stmt: tirx.Stmt) -> None:
        qualifiers = {name: spec.qualifier(call, name) for name, _ in spec.qualifiers}
        order = {"scope": qualifiers.get("scope", "sys"), "sem": qualifiers.get("sem", "")}
        if spec.participants:
            scope = "gpu" if spec.participants == "grid" else "sys"
            self._add_event(
                "barrier", spec.text, call, stmt, scope=scope, participants=spec.participants
            )
        elif spec.is_fence:
            self._add_event("fence", spec.text, call, stmt, **order)
        elif spec.waits:
            value = call.args[1]
            self._add_event(
                "wait", spec.text, call, stmt, **order, value=value, relation=spec.waits
            )
        elif qualifiers.get("sem") and spec.writes:
            combination = spec.combination(call)
            self._add_event(
                "signal", spec.text, call, stmt, **order, adds=combination == "add",
                value=call.args[1] if combination in ("add", "set") else None,
            )  # fmt: skip

    def _add_event(
        self, kind: EventKind, op: str, call: tirx.Call, stmt: tirx.Stmt, **more
    ) -> None:
        has_word = len(call.args) and kind in ("signal", "wait", "barrier")
        pointer = call.args[0] if has_word else None
        load = pointer.args[0] if op_name(pointer) == "tl.access_ptr" else None
        starts = tuple(load.indices) if load is not None else ()
        if more.get("value") is not None:
            more["value"] = self._resolve(more["value"])
        used = self._threads_in([*starts, *self._conditions])
        self.events.append(Event(
            kind, op, load.buffer if load is not None else None,
            tuple(self._resolve(s) for s in starts), (tirx.IntImm("int32", 1),) * len(starts),
            (*self._loops, *used), tuple(self._conditions), tuple(self._serial_loops),
            self._number, self._line_of(stmt),
            tuple(self.program.grid), self._kernel, by_last=self._by_last(), **more,
        ))  # fmt: skip

    def _line_of(self, stmt: tirx.Stmt) -> str:
        return line_of(stmt) or (line_of(self._anchor) if self._anchor is not None else "")


def _polled(stmt: tirx.While) -> Iterator[tuple[tirx.Call, tirx.PrimExpr]]:
    """Yield each load and atomic operation that a loop repeats until its condition fails.

    The second element is the part of the condition that holds the result: the call itself, or the
    register that stores its result.
    """
    registers: dict[tirx.Var, tirx.BufferLoad] = {}
    for load in nodes_in(stmt.condition, tirx.BufferLoad):
        if load.buffer.scope() == "local.var":
            registers[load.buffer.data] = load
    results: list[tuple[tirx.Call, tirx.PrimExpr]] = [
        (call, call) for call in builtins_in(stmt.condition)
    ]
    for store in nodes_in(stmt.body, tirx.BufferStore):
        if store.buffer.data in registers:
            results += [(c, registers[store.buffer.data]) for c in builtins_in(store.value)]
    for call, result in results:
        if builtin_of(call).loads or builtin_of(call).fetches:
            yield call, result


def _bound(condition: tirx.PrimExpr, load: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """Return the value that the flag must reach to end ``while load < bound`` (or ``!=``)."""
    if isinstance(condition, tirx.LT) and condition.a.same_as(load):
        return condition.b
    if isinstance(condition, tirx.NE) and condition.a.same_as(load):
        return condition.b
    return None
