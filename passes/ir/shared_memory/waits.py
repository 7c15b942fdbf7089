"""Find waits for mbarriers that may never end, by following the threads of one block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import IRModule, tirx

from ..uniformity import BREAKS, RETURN
from ..walk import (
    calls_in,
    children_of,
    headers_of,
    is_leaf,
    line_of,
    nodes_in,
    op_name,
    variables_in,
)
from .effects import (
    LOAD,
    Access,
    Arrive,
    Await,
    Barrier,
    Effect,
    Exit,
    effects_of,
    mbarrier_of,
    mbarrier_sizes,
)
from .launches import Launch, blocks_of, scalars_of
from .values import WARP, ThreadValues, warps_of

_STEPS = 4096
"""Statements that are followed; a fault after them is not found."""
_GROUPS = 64
"""Most groups of threads that are followed."""
_BLOCKS = (0, 1, 2, 3, 1 << 20)
"""Indices of the blocks that are followed if waits depend on them: the first ones and the last."""
_SCALAR = 4096
"""Value of the scalars of a launch on which waits depend: a multiple of the usual tiles."""
_OWN = "mbarrier"
"""Name of the mbarriers that TileLang allocates for pipelined loops."""
_NOT_FOLLOWED = ("tl.named_barrier_arrive", "tl.ptx_arrive_cluster_barrier")

Slot = tuple[tirx.Var, int]
_Clock = dict[Any, int]
"""What threads know to have happened: the number of complete phases of each mbarrier, and the
number of waits that have ended in each group of threads."""


@dataclass(frozen=True)
class WaitFault:
    """A wait for an mbarrier that may never end, or a load without one.

    Attributes:
        op: the operation, for a message.
        what, legal: the fault, and what is legal, for a message.
        lines: source lines of the operation, and of what other threads wait for.
    """

    op: str
    what: str
    legal: str
    lines: tuple[str, ...]


def mbarriers_of(mod: IRModule) -> set[str]:
    """Return the names of the mbarriers that programs allocate."""
    blocks = [b for f in mod.functions.values() for b in nodes_in(f.body, tirx.SBlock)]
    return {data.name for b in blocks for data in b.annotations.get("barrier_init", {})}


def wait_fault(func: tirx.PrimFunc, mbarriers: Collection[str]) -> WaitFault | None:
    """Return the first fault of the waits for mbarriers in a device function, or None.

    Each group of threads of a block is followed as far as it gets, through all iterations, and
    asynchronous copies end. A wait may never end if it blocks after all phases that do not depend
    on it are complete: its phase is missing, or the next one may be complete, too, before the
    threads look at the mbarrier. If no wait is so, each order of events has the same phases, and
    one order stands for all. A load that no thread waits for may write after the block has ended.
    Waits that depend on memory are not followed.

    TileLang's own mbarriers of pipelined loops with producers have its protocol. Their waits may
    end before those of warps that load nothing, which passes after this one end.

    Args:
        mbarriers: names of those of the program.
    """
    others = frozenset({_OWN} - {*mbarriers})
    effects = [e for leaf in nodes_in(func.body, tirx.Evaluate) for e in effects_of(leaf, set())]
    waits = [e for e in effects if isinstance(e, Await)]
    if all(mbarrier_of(e.barrier)[0].name in others for e in waits):
        return None
    with suppress(_UnknownValueError):
        return _Block(func, {}, others).fault()
    scalars = dict.fromkeys(scalars_of(func), _SCALAR)
    for index in _BLOCKS:
        blocks = {
            block: index if extent is None else min(index, extent - 1)
            for block, extent in blocks_of(func).items()
        }
        with suppress(_UnknownValueError):
            fault = _Block(func, scalars | blocks, others).fault()
            if fault is not None:
                return fault
    return None


class _UnknownValueError(Exception):
    """A wait depends on a value that is not known."""


@dataclass(frozen=True)
class _Rest:
    """A statement that a group of threads executes next.

    Attributes:
        stmt: the next statement; None if only the threads change.
        line: its source line, or that of the innermost statement around it that has one.
        then: what follows.
        numbers: further iterations, if the statement is a loop that has begun.
        threads: those that execute it, if they are in the group; None if they do not change.
    """

    stmt: tirx.Stmt | None
    line: str
    then: _Rest | None
    numbers: range | None = None
    threads: np.ndarray | None = None


@dataclass
class _MBarrier:
    """An mbarrier.

    Attributes:
        count: number of arrivals of each phase.
        arrived: number of arrivals of the current phase.
        clock: what the threads that have arrived know.
        phases: what threads know after each complete phase.
        loads: number of phases that are complete after the last load, and its source line.
        expecting: the same for loads that follow, if the last arrival expects their bytes; else 0.
    """

    count: int
    arrived: int = 0
    clock: _Clock = field(default_factory=dict)
    phases: list[_Clock] = field(default_factory=list)
    loads: tuple[int, str] = (0, "")
    expecting: int = 0


@dataclass(eq=False)
class _Group:
    """Threads that execute the same statements.

    Attributes:
        effects: effects of the current statement that have not happened yet.
        line: source line of this statement.
        is_meeting: whether the threads wait at a barrier.
        members: the threads, and those that wait for them to end a case of a branch.
    """

    threads: np.ndarray
    rest: _Rest | None
    clock: _Clock
    effects: list[Effect] = field(default_factory=list)
    line: str = ""
    is_meeting: bool = False
    members: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.members = self.threads


@dataclass(frozen=True)
class _Wait:
    """A wait of a group, after ``number`` other ones of the group, whose threads know that
    ``known`` phases are complete."""

    group: _Group
    number: int
    known: int
    slot: Slot
    parity: int
    line: str


class _Block:
    """The threads of a block.

    Args:
        launch: values of block indices and scalars; other ones are unknown.
        others: names of mbarriers whose waits have no fault.
    """

    def __init__(self, func: tirx.PrimFunc, launch: Launch, others: frozenset[str]) -> None:
        self._others = others
        self._values = ThreadValues.of_launch(func, launch)
        everyone = np.ones(self._values.count, bool)
        self._groups = [_Group(everyone, _Rest(func.body, "", None), {})]
        if calls_in(func.body, lambda call: op_name(call) in _NOT_FOLLOWED):
            raise _UnknownValueError
        sizes = mbarrier_sizes(func, self._values)
        self._mbarriers = {slot: _MBarrier(size) for slot, size in sizes.items()}
        self._meetings: dict[int, list[_Group]] = defaultdict(list)
        self._waits: list[_Wait] = []
        self._steps = 0
        self._effects: dict[tirx.Stmt, list[Effect]] = {}
        self._relevant: dict[tirx.Stmt, bool] = {}
        self._deciding: set[tirx.Var] = set()
        self._find_deciding(func.body)

    def fault(self) -> WaitFault | None:
        """Return the first fault, or None."""
        before = -1
        while before < self._steps < _STEPS:
            before = self._steps
            for group in list(self._groups):
                self._advance(group)
            if before == self._steps and any([self._release(group) for group in self._groups]):
                before = -1
        stuck = self._stuck() if self._steps < _STEPS else []
        if any(wait.slot[0].name in self._others for wait in stuck):
            return None
        for wait in (*self._waits, *stuck):
            if wait.slot[0].name in self._others:
                continue
            phases = self._mbarriers[wait.slot].phases
            others = sum(clock.get(wait.group, 0) <= wait.number for clock in phases)
            if others % 2 == wait.parity:
                lines = tuple(w.line for w in stuck) if wait in stuck else (wait.line,)
                return _endless(wait, others, lines)
        return self._unawaited() if self._steps < _STEPS else None

    def _unawaited(self) -> WaitFault | None:
        """Return a load that no thread waits for, or None."""
        for slot, mbarrier in self._mbarriers.items():
            phase, line = mbarrier.loads
            if slot[0].name in self._others:
                continue
            if max(group.clock.get(slot, 0) for group in self._groups) < phase:
                what = f"no thread waits for the last load that completes on {_name(slot)}"
                legal = "a wait before the end of the block, whose shared memory the load writes"
                return WaitFault("shared memory", what, legal, (line,))
        return None

    def _stuck(self) -> list[_Wait]:
        """Return the waits that block, and those of the threads that wait at barriers."""
        return [
            self._wait(group, group.effects[0])
            for group in self._groups
            if group.effects and isinstance(group.effects[0], Await)
        ]

    # Statements

    def _advance(self, group: _Group) -> None:
        """Follow threads until they wait or end."""
        while self._steps < _STEPS and not group.is_meeting:
            while group.effects:
                if not self._apply(group, group.effects[0]):
                    return
                self._steps += 1
                del group.effects[0]
                if group.is_meeting:
                    return
            if group.rest is None:
                self._complete(0, None)
                return
            self._steps += 1
            rest, group.rest = group.rest, group.rest.then
            if rest.threads is not None:
                group.threads = rest.threads & group.members
            if rest.stmt is not None and group.threads.any():
                self._statement(group, rest)

    def _statement(self, group: _Group, rest: _Rest) -> None:
        stmt, line = rest.stmt, line_of(rest.stmt) or rest.line
        if rest.numbers is not None:
            self._repeat(group, rest)
        elif not self._is_relevant(stmt):
            pass
        elif is_leaf(stmt):
            group.effects, group.line = [*self._effects_of(stmt)], line
            if _target(stmt) in self._deciding:
                self._values.threads = group.threads
                if isinstance(stmt, tirx.BufferStore):
                    is_followed = self._values.follows(stmt.buffer)
                    self._values.store(stmt, group.threads, is_followed)
                else:
                    self._values.assign(stmt.var, self._values.value(stmt.value), group.threads)
        elif isinstance(stmt, tirx.IfThenElse):
            self._branch(group, stmt, line)
        elif isinstance(stmt, tirx.For):
            first = self._of_threads(stmt.min, group)
            for begin, part in self._split(group, first):
                for extent, own in self._split(part, self._of_threads(stmt.extent, part)):
                    numbers = range(int(begin), int(begin + extent))
                    self._repeat(own, _Rest(stmt, line, own.rest, numbers))
        elif isinstance(stmt, tirx.While):
            self._repeat(group, _Rest(stmt, line, group.rest, range(1)))
        else:
            if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
                self._values.launch(stmt.node.thread_tag, stmt.node.var, stmt.value)
            for child in reversed(children_of(stmt)):
                if self._is_relevant(child):
                    group.rest = _Rest(child, line, group.rest)

    def _branch(self, group: _Group, stmt: tirx.IfThenElse, line: str) -> None:
        """Let threads execute their cases of a branch. The threads of a warp do so one case after
        the other, and continue together."""
        fails = self._of_threads(stmt.condition, group) == 0
        both = warps_of(group.threads & fails) & warps_of(group.threads & ~fails)
        is_divided = (both >> np.arange(len(fails)) // WARP) & 1
        for _, part in self._split(group, np.where(is_divided, 2, fails)):
            threads = part.threads
            part.rest = _Rest(None, line, part.rest, threads=threads)
            for case, own in (
                (stmt.else_case, threads & fails),
                (stmt.then_case, threads & ~fails),
            ):
                if case is not None and self._is_relevant(case) and own.any():
                    part.rest = _Rest(case, line, part.rest, threads=own)

    def _divide(self, group: _Group, threads: np.ndarray) -> _Group:
        """Remove threads from a group. Return them as a group that executes the same."""
        part = _Group(threads, group.rest, group.clock, [*group.effects], group.line)
        group.members = group.members & ~threads
        group.threads = group.threads & ~threads
        self._groups.append(part)
        if len(self._groups) > _GROUPS:
            raise _UnknownValueError
        return part

    def _release(self, group: _Group) -> bool:
        """Let the threads that wait for a group continue without it. Return whether there are
        any."""
        others = group.members & ~group.threads
        if not others.any():
            return False
        part = self._divide(group, others)
        part.effects.clear()
        while part.rest.threads is None:
            part.rest = part.rest.then
        return True

    def _repeat(self, group: _Group, rest: _Rest) -> None:
        """Let a group begin the next iteration of a loop, if there is one."""
        loop, numbers = rest.stmt, rest.numbers
        if isinstance(loop, tirx.While):
            holds = self._of_threads(loop.condition, group) != 0
            for value, part in self._split(group, holds):
                if value:
                    part.rest = _Rest(loop.body, rest.line, rest)
        elif numbers:
            self._values.assign(loop.loop_var, numbers[0], group.threads)
            again = _Rest(loop, rest.line, rest.then, numbers[1:])
            group.rest = _Rest(loop.body, rest.line, again)

    def _split(self, group: _Group, values: np.ndarray) -> list[tuple[Any, _Group]]:
        """Divide a group by the values of its threads. Return each value with its threads."""
        own = values[group.threads]
        first, *others = own[:1] if (own == own[0]).all() else np.unique(own)
        parts = [(n, self._divide(group, group.threads & (values == n))) for n in others]
        return [(first, group), *parts]

    def _of_threads(self, expr: tirx.PrimExpr, group: _Group) -> np.ndarray:
        """Return the value of ``expr`` in each thread of the block; it is known in the group."""
        self._values.threads = group.threads
        value = self._values.value(expr)
        if value is None or value.size not in (1, len(value)):
            raise _UnknownValueError
        return np.broadcast_to(value.ravel(), len(group.threads))

    def _is_relevant(self, stmt: tirx.Stmt) -> bool:
        """Return whether a statement contains a synchronization, or a value that decides one."""
        if stmt not in self._relevant:
            if is_leaf(stmt):
                is_relevant = _target(stmt) in self._deciding or bool(self._effects_of(stmt))
            else:
                is_relevant = any([self._is_relevant(child) for child in children_of(stmt)])
                is_launch = isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent"
                is_relevant = is_relevant or is_launch
            self._relevant[stmt] = is_relevant
        return self._relevant[stmt]

    def _find_deciding(self, body: tirx.Stmt) -> None:
        """Find the variables and local buffers on whose values synchronization depends."""
        count = -1
        while count < len(self._deciding):
            count = len(self._deciding)
            self._relevant.clear()
            self._is_relevant(body)
            for stmt in [stmt for stmt, is_relevant in self._relevant.items() if is_relevant]:
                for expr in self._operands(stmt):
                    self._deciding.update(variables_in(expr))
                    self._deciding |= {load.buffer.data for load in nodes_in(expr, tirx.BufferLoad)}

    def _operands(self, stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
        if not is_leaf(stmt):
            return headers_of(stmt)
        operands = [stmt.value] if not isinstance(stmt, tirx.Evaluate) else []
        for effect in self._effects_of(stmt):
            if not isinstance(effect, Barrier | Exit):
                operands.append(mbarrier_of(effect.barrier)[1])
            if isinstance(effect, Await):
                operands.append(effect.parity)
        return operands

    def _effects_of(self, stmt: tirx.Stmt) -> list[Effect]:
        if stmt not in self._effects:
            effects = effects_of(stmt, set())
            self._effects[stmt] = [*filter(_is_followed, effects)]
        return self._effects[stmt]

    # Effects

    def _apply(self, group: _Group, effect: Effect) -> bool:
        """Let an effect happen; return False if the threads wait."""
        match effect:
            case Arrive():
                self._arrive(self._slot(effect.barrier, group), group, effect.expects)
            case Await():
                return self._await(self._wait(group, effect))
            case Access():
                mbarrier = self._mbarrier(self._slot(effect.barrier, group))
                phase = mbarrier.expecting or len(mbarrier.phases) + 1
                mbarrier.loads = phase, group.line
            case Barrier():
                self._meet(effect, group)
            case Exit():
                self._jump(effect.name, group)
        return True

    def _one(self, expr: tirx.PrimExpr, group: _Group) -> int:
        """Return the value of ``expr`` in a group. Threads with other values leave the group."""
        ((value, _), *_) = self._split(group, self._of_threads(expr, group))
        return int(value)

    def _slot(self, barrier: Any, group: _Group) -> Slot:
        data, index = mbarrier_of(barrier)
        return data, self._one(index, group)

    def _wait(self, group: _Group, effect: Await) -> _Wait:
        slot, parity = self._slot(effect.barrier, group), self._one(effect.parity, group)
        number, known = (group.clock.get(key, 0) for key in (group, slot))
        return _Wait(group, number, known, slot, parity & 1, group.line)

    def _mbarrier(self, slot: Slot) -> _MBarrier:
        if slot not in self._mbarriers:
            raise _UnknownValueError
        return self._mbarriers[slot]

    def _arrive(self, slot: Slot, group: _Group, expects: bool) -> None:
        mbarrier = self._mbarrier(slot)
        mbarrier.expecting = len(mbarrier.phases) + 1 if expects else 0
        mbarrier.clock = _join(mbarrier.clock, group.clock)
        mbarrier.arrived += int(group.threads.sum())
        while mbarrier.arrived >= mbarrier.count:
            mbarrier.arrived -= mbarrier.count
            mbarrier.clock = {**mbarrier.clock, slot: len(mbarrier.phases) + 1}
            mbarrier.phases.append(mbarrier.clock)

    def _await(self, wait: _Wait) -> bool:
        """End a wait if it does not block; return whether it does not."""
        phases, group = self._mbarrier(wait.slot).phases, wait.group
        if len(phases) % 2 == wait.parity:
            return False
        if wait.known % 2 == wait.parity:
            group.clock = _join(group.clock, phases[wait.known])
        group.clock = {**group.clock, group: wait.number + 1}
        self._waits.append(wait)
        return True

    def _meet(self, barrier: Barrier, group: _Group) -> None:
        """Let threads wait at a barrier, and continue if they are the last ones."""
        if barrier.number is None:
            raise _UnknownValueError
        meeting = self._meetings[barrier.number]
        meeting.append(group)
        group.is_meeting = True
        self._complete(barrier.number, barrier.count)

    def _complete(self, number: int, count: int | None) -> None:
        """Let threads pass a barrier if all have arrived. The barrier of the block does not count
        threads that have ended."""
        meeting = self._meetings[number]
        others = self._groups if count is None else ()
        ended = [group for group in others if group.rest is None and not group.effects]
        size = sum(int(group.threads.sum()) for group in {*meeting, *ended})
        if size >= (self._values.count if count is None else count):
            clock = _join(*(group.clock for group in meeting))
            for group in meeting:
                group.clock, group.is_meeting = clock, False
            meeting.clear()

    def _jump(self, name: str, group: _Group) -> None:
        """Leave the function, the innermost loop or its iteration."""
        self._release(group)
        rest = None if name in RETURN else group.rest
        while rest is not None and rest.numbers is None:
            rest = rest.then
        group.rest = rest.then if rest is not None and name in BREAKS else rest


def _endless(wait: _Wait, phases: int, lines: tuple[str, ...]) -> WaitFault:
    """Return the fault of a wait.

    Args:
        phases: number of phases that are complete when no other thread can continue.
    """
    what = f"threads wait for parity {wait.parity} of {_name(wait.slot)}"
    if phases > wait.known:
        what += f", and may wait forever, as {phases} of its phases may be complete before it"
        legal = f"parity {wait.parity ^ 1}, or arrivals that follow this wait"
    else:
        what += f" forever: {phases} of its phases are complete, and no thread completes one"
        legal = f"parity {wait.parity ^ 1}, or arrivals before this wait"
    return WaitFault("T.barrier_wait", what, legal, lines)


def _name(slot: Slot) -> str:
    return f"{slot[0].name}[{slot[1]}]"


def _is_followed(effect: Effect) -> bool:
    if isinstance(effect, Access):
        return effect.end == LOAD and effect.condition is None
    return isinstance(effect, Arrive | Await | Barrier | Exit)


def _target(stmt: tirx.Stmt) -> tirx.Var | None:
    """Return the variable that a leaf statement binds, or that of the buffer that it stores to."""
    if isinstance(stmt, tirx.Bind):
        return stmt.var
    return stmt.buffer.data if isinstance(stmt, tirx.BufferStore) else None


def _join(*clocks: _Clock) -> _Clock:
    joined: _Clock = {}
    for clock in clocks:
        joined |= {key: max(n, joined.get(key, 0)) for key, n in clock.items()}
    return joined
