"""Follow the threads of a block through a device function, and find accesses that are unordered."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
from tilelang import tvm
from tvm import tirx

from ..accesses import is_private
from ..thread_sets import disjoint
from ..uniformity import BREAKS, RETURN, Divergence, RegisterFlow
from ..walk import (
    MBARRIER_WAIT,
    calls_in,
    children_of,
    headers_of,
    is_leaf,
    may_not_run,
    nodes_in,
    op_name,
)
from ..warp_roles import is_specialized, roles_of
from . import pending as order
from .barriers import NUMBERS, Arrival, Barriers, Waiting
from .effects import (
    COPY,
    LOAD,
    WRITE,
    Access,
    Arrive,
    Await,
    Barrier,
    Commit,
    Complete,
    Describe,
    Effect,
    Exit,
    Publish,
    SyncWarp,
    Use,
    commute,
    data_of,
    effects_of,
    mbarrier_of,
    mbarrier_sizes,
    orders_threads,
)
from .findings import Found, Frame, MisplacedBarrier, Missing, Path
from .footprints import Footprints
from .iterations import UNKNOWN, followed_iterations
from .launches import Launch
from .pending import Pending
from .phases import Counts, Phases, Slots
from .values import (
    BITWISE_LOGIC,
    WARP,
    ThreadValues,
    threads_of,
    warps_of,
    whole_warps_of,
)

_INNER = 64
"""Iterations of a loop without a barrier whose number is unknown."""


_State = dict[Any, Pending]
Steps = Iterator[None]
"""Steps of a part of the function, between which threads wait for others."""


@dataclass
class _Loop:
    """The innermost loop around a place.

    Attributes:
        mask: its threads at the begin of the current iteration.
        ended, continued: threads that have left it, and that have left its current iteration.
        knows_ended, knows_continued: whether these are all.
        skips: states where threads may continue, under conditions that are not known.
        waiting: arrivals before the loop, see ``Barriers``.
        is_certain: whether its iterations, and the conditions around it, are known.
    """

    mask: np.ndarray
    waiting: Waiting = field(default_factory=dict)
    is_certain: bool = True
    ended: np.ndarray | np.bool_ = np.False_
    continued: np.ndarray | np.bool_ = np.False_
    knows_ended: bool = True
    knows_continued: bool = True
    skips: list[_State] = field(default_factory=list)


@dataclass
class _Blocked:
    """Threads that wait for the first arrivals at an mbarrier, which follow in the text.

    Attributes:
        behind: threads that cannot go on before these do: they meet them at ``barrier``.
    """

    slots: Slots
    threads: np.ndarray
    path: Path
    behind: np.ndarray | np.bool_ = np.False_
    barrier: Arrival | None = None


class Walk:
    """One walk through a function.

    Args:
        rows: result of ``footprints.row_sizes``.
        launch: values of block indices and scalars; other ones are unknown.
        divides: whether threads of different branches follow the statements between them on their
            own. They do if they cannot continue together.
        follows_text: whether the cases of a branch are followed one after the other. They are if
            none can continue otherwise: what their threads wait for is not known.
    """

    def __init__(
        self, func: tirx.PrimFunc, rows: Mapping[str, int], launch: Launch, divides: bool = False,
        follows_text: bool = False,
    ) -> None:  # fmt: skip
        self._rows, self._launch = rows, launch
        self._func = func
        self._values = ThreadValues.of_launch(func, launch)
        self._footprints = Footprints(self._values, func.body, rows)
        roles = roles_of(func)
        producers = 0 if roles is None else int(roles.producers)
        self._producers = (1 << producers // WARP) - 1
        self._control = RegisterFlow(func, self._values.count - producers)
        self._cleared = {s.buffer.data for s in nodes_in(func.body, tirx.BufferStore)}
        self._effects: dict[Any, list[Effect]] = {}
        self._may_not_run = cache(may_not_run)
        self._has_order: dict[tirx.Stmt, bool] = {}
        self._visits: Counter[tirx.Stmt] = Counter()
        """Number of times that each loop has begun."""
        self._followed_iterations: dict[tuple[Any, ...], list[int]] = {}
        self._state: _State = {}
        self._path: list[Frame] = []
        self._mask = np.ones((self._values.count,) + (1,) * 11, bool)
        self._all_warps = (1 << self._values.warps) - 1
        self._exact = True
        self._is_certain = True
        """Whether the conditions around the place, inside its loop, are known in each thread."""
        self._loops = [_Loop(self._mask)]
        self._exits: list[list[_State]] = [[]]
        self._number = 0
        """Number of the current statement, of those executed so far."""
        self._barriers = Barriers(self._values.count, producers)
        self._specialized_at: dict[tirx.Stmt, float] = {}
        self._phases = Phases(mbarrier_sizes(func, self._values))
        self._guards: Slots = frozenset()
        """Mbarriers that threads have waited for since the last bulk load before the wait."""
        self._has_loaded = False
        """Whether a bulk load followed these waits."""
        self._awaited = 0
        """Number of the statement with the last wait for an mbarrier."""
        self.is_vague = False
        """True if it is unknown which phases some threads wait for."""
        self._returned: dict[tuple[tirx.Var, int], Path] = {}
        """Newest wait for each mbarrier, if it may return at once."""
        self._written: set[tirx.Var | None] = set()
        self._arrived: Slots = frozenset()
        """Mbarriers at which threads have arrived."""
        self._blocked: list[_Blocked] = []
        self._divides, self._follows_text = divides, follows_text

    @cached_property
    def _counts_phases(self) -> bool:
        """True if registers count the phases or the stages for which threads wait."""
        waits = calls_in(self._func.body, lambda call: op_name(call) == MBARRIER_WAIT)
        return any(map(is_private, (n.buffer for w in waits for n in nodes_in(w, tirx.BufferLoad))))

    @cached_property
    def _waiting_loops(self) -> list[tirx.For]:
        """Loops in which threads wait for mbarriers."""
        return [*filter(self._awaits, nodes_in(self._func.body, tirx.For))]

    def finding(self) -> Missing | MisplacedBarrier | None:
        """Return the first fault of the function, or None."""
        if not self._footprints.sizes and not self._orders(self._func.body):
            return None
        try:
            for _ in self._statement(self._func.body):
                waiting = chain.from_iterable(self._barriers.waiting.values())
                # Nobody comes to a barrier of the block that only some threads reach.
                is_misplaced = any(arrival.barrier.count is None for arrival in waiting)
                divides = not self._divides and not is_misplaced
                walk = Walk(self._func, self._rows, self._launch, divides, not divides)
                finding, self.is_vague = walk.finding(), walk.is_vague
                return finding
            self._barriers.require_none()
        except Found as found:
            return found.finding
        return None

    @staticmethod
    def arrives(stmt: tirx.Stmt) -> bool:
        """Return whether a part of ``stmt`` arrives at an mbarrier."""
        return _has_effect(stmt, Arrive)

    @staticmethod
    def awaits(stmt: tirx.Stmt) -> bool:
        """Return whether a part of ``stmt`` waits for an mbarrier."""
        return _has_effect(stmt, Await)

    # Statements

    def _inside(self, parent: tirx.Stmt, index: int, stmt: tirx.Stmt) -> Steps:
        self._path.append(self._frame(parent, index, stmt))
        yield from self._statement(stmt)
        self._path.pop()

    def _frame(self, parent: tirx.Stmt, index: int, stmt: tirx.Stmt) -> Frame:
        return Frame(parent, index, stmt, self._reaching, self._exact)

    def _statement(self, stmt: tirx.Stmt) -> Steps:
        """Follow a statement, and stop where its threads wait for those of another case."""
        if not self._mask.any():
            return
        if is_leaf(stmt):
            yield from self._apply_all(self._effects_of(stmt))
            self._control.store(stmt)
            if isinstance(stmt, tirx.Bind):
                self._control.bind(stmt)
                self._values.bind(stmt.var, stmt.value)
            elif isinstance(stmt, tirx.BufferStore) and self._values.follows(stmt.buffer):
                self._values.store(stmt, threads_of(self._mask), self._is_path_known)
        elif isinstance(stmt, tirx.IfThenElse):
            yield from self._branch([stmt], lambda: self._inside(stmt, 0, stmt.then_case))
        elif isinstance(stmt, tirx.SeqStmt):
            yield from self._sequence(stmt)
        elif isinstance(stmt, tirx.For | tirx.While):
            yield from self._loop(stmt)
        else:
            self._control.enter(stmt)
            if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
                self._values.launch(stmt.node.thread_tag, stmt.node.var, stmt.value)
            for index, child in enumerate(children_of(stmt)):
                yield from self._inside(stmt, index, child)

    def _effects_of(self, node: Any) -> list[Effect]:
        if node not in self._effects:
            self._effects[node] = effects_of(node, self._cleared)
        return self._effects[node]

    def _orders(self, stmt: tirx.Stmt) -> bool:
        """Return whether a part of ``stmt`` changes what is ordered."""
        if stmt not in self._has_order:
            headers = (orders_threads(self._effects_of(h)) for h in headers_of(stmt))
            own = is_leaf(stmt) and orders_threads(self._effects_of(stmt))
            self._has_order[stmt] = own or any(headers) or any(map(self._orders, children_of(stmt)))
        return self._has_order[stmt]

    def _sequence(self, stmt: tirx.SeqStmt) -> Steps:
        """Follow the statements of a sequence; branches of different threads in a row, and what
        these threads execute on their own between them, are followed together, like the cases of
        one branch."""
        at = 0
        skipped: list[tirx.Stmt] = []
        while at < len(stmt.seq):
            mask, exact = self._mask, self._exact
            end, parts = self._parts_from(stmt, at)
            if len(parts) == 1:
                yield from self._parts(stmt, parts[0][1])
            else:
                cases = [(mask & threads, self._parts(stmt, places)) for threads, places in parts]
                yield from self._interleave(cases)
                self._remain(mask, exact)
            if not skipped and any(map(self._control.after, stmt.seq[at:end])):
                skipped = [*stmt.seq[end:]]
            at = end
        for inner in skipped:
            self._control.leave(inner)

    def _parts_from(
        self, stmt: tirx.SeqStmt, at: int
    ) -> tuple[int, list[tuple[np.ndarray, list[tuple[int, int]]]]]:
        """Return the place after the branches on the thread that begin at ``at`` in a sequence, and
        the parts of different threads: the threads, and the first and last place of each branch, or
        statement between branches. A statement that is no such branch is one part.

        Branches in a row with one condition are one branch: TileLang gives each statement of a
        pipelined loop the conditions around it.
        """
        branches: list[tuple[np.ndarray, tuple[int, int]]] = []
        between: list[tuple[int, int]] = []
        end = at
        while end < len(stmt.seq):
            begin, end = end, end + 1
            while end < len(stmt.seq) and _is_same_branch(stmt.seq[begin], stmt.seq[end]):
                end += 1
            threads = self._threads_of_branch(stmt.seq[begin])
            if threads is not None:
                branches.append((threads, (begin, end)))
            elif branches and self._divides:
                between.append((begin, end))
            else:
                break
        if not any(self._orders(stmt.seq[n]) for _, places in branches for n in range(*places)):
            first = branches[0][1] if branches else (at, end)
            return first[1], [(self._mask, [first])]
        end, parts = branches[-1][1][1], disjoint(branches)
        between = [places for places in between if places < (end, end)]
        if between and len(parts) > 1:
            rest = self._mask & ~np.logical_or.reduce([threads for threads, _ in parts])
            parts += [(rest, [])] if rest.any() else []
        return end, [(threads, places + between) for threads, places in parts]

    def _threads_of_branch(self, stmt: tirx.Stmt) -> np.ndarray | None:
        """Return the threads that execute a branch with one case, if they are some threads that its
        condition alone decides about; else None."""
        if not isinstance(stmt, tirx.IfThenElse) or stmt.else_case is not None:
            return None
        if nodes_in(stmt.condition, tirx.BufferLoad, tirx.Call):
            return None
        may, must = self._values.truth(stmt.condition)
        own = self._mask & may
        return own if np.array_equal(may, must) and own.any() else None

    def _parts(self, stmt: tirx.SeqStmt, places: list[tuple[int, int]]) -> Steps:
        """Follow statements of a sequence, each of which may be a branch in several statements."""
        for at, end in sorted(places):
            if end == at + 1:
                yield from self._inside(stmt, at, stmt.seq[at])
            else:
                yield from self._branch([*stmt.seq[at:end]], partial(self._cases, stmt, at, end))

    def _cases(self, stmt: tirx.SeqStmt, at: int, end: int) -> Steps:
        for index in range(at, end):
            branch = stmt.seq[index]
            self._path.append(self._frame(stmt, index, branch))
            yield from self._inside(branch, 0, branch.then_case)
            self._path.pop()

    def _branch(self, branches: list[tirx.IfThenElse], follow: Callable[[], Steps]) -> Steps:
        """Follow both cases of a branch.

        Args:
            branches: the branch, in one or several statements.
            follow: follows the first case.
        """
        stmt = branches[0]
        yield from self._apply_all(self._effects_of(stmt.condition))
        may, must = self._values.truth(stmt.condition)
        mask, exact, certain = self._mask, self._exact, self._is_certain
        then_mask, else_mask = mask & may, mask & ~must
        may_differ = self._may_differ(stmt.condition)
        cases = [(then_mask, follow)]
        if stmt.else_case is not None:
            cases.append((else_mask, partial(self._inside, stmt, 1, stmt.else_case)))
        if not (then_mask & else_mask).any():
            yield from self._interleave([(m, case()) for m, case in cases if m.any()])
        else:
            self._is_certain = False
            varies = self._varies(stmt.condition)
            # Whether each case runs in all threads of its mask or in none of them.
            then_exact = not varies and not (mask & must).any()
            else_exact = not varies and not (mask & ~may).any()
            is_exact = [exact and then_exact, exact and else_exact]
            cases = [(m, e, case) for (m, case), e in zip(cases, is_exact, strict=False)]
            yield from self._either(stmt, cases, varies, then_exact and else_exact)
        if may_differ:
            for branch in branches:
                self._control.leave(branch)
        self._is_certain = certain
        self._remain(mask, exact)

    def _interleave(self, cases: list[tuple[np.ndarray, Steps]]) -> Steps:
        """Follow the cases of a branch by different threads, each as far as these get.

        Args:
            cases: the threads and the steps of each case.
        """
        registers = self._control.state
        around = self._context()
        contexts = {steps: around | {"_mask": mask} for mask, steps in cases}
        ends = [registers] if len(cases) < 2 else []
        while contexts:
            number = self._number
            for steps, context in [*contexts.items()]:
                self._enter(context)
                if next(steps, self) is self:
                    del contexts[steps]
                    ends.append(self._control.state)
                else:
                    contexts[steps] = self._context()
            if contexts and self._number == number:
                yield
        self._enter(around)
        for end in ends:
            self._control.join(end)

    def _context(self) -> dict[str, Any]:
        """Return the attributes that belong to the threads of one case, and their registers."""
        names = ("_mask", "_exact", "_is_certain", "_guards", "_has_loaded", "_awaited")
        context = {name: getattr(self, name) for name in names}
        lists = {name: tuple(getattr(self, name)) for name in ("_path", "_loops", "_exits")}
        return {**context, **lists, "registers": self._control.state}

    def _enter(self, context: dict[str, Any]) -> None:
        """Continue with the threads of one case."""
        attributes = {**context}
        self._control.restore(attributes.pop("registers"))
        for name, value in attributes.items():
            setattr(self, name, [*value] if isinstance(value, tuple) else value)

    def _either(
        self,
        stmt: tirx.IfThenElse,
        cases: list[tuple[np.ndarray, bool, Callable[[], Steps]]],
        varies: bool,
        is_one_case: bool,
    ) -> Steps:
        """Follow the cases of a branch on a condition that is unknown, one after the other.

        Args:
            cases: threads that may execute each case, whether all of them do if one does, and its
                steps.
            varies: whether the condition may differ between threads.
            is_one_case: whether all threads execute the same case.
        """
        before, registers = self._state, self._control.state
        phases, waiting = self._phases.counts, dict(self._barriers.waiting)
        (self._mask, self._exact, follow), *others = cases
        yield from follow()
        self._barriers.require_equal(waiting)
        after_then, then_registers = self._state, self._control.state
        then_phases, self._phases.counts = self._phases.counts, phases
        self._control.restore(registers)
        skipped = before if varies else self._without(stmt.then_case, before)
        if is_one_case:
            self._state = skipped
        for self._mask, self._exact, follow in others:
            yield from follow()
        self._barriers.require_equal(waiting)
        self._state = _join(after_then, self._state, None if is_one_case else skipped)
        self._phases.join(then_phases)
        self._control.join(then_registers)

    def _remain(self, mask: np.ndarray, exact: bool) -> None:
        """Continue with those threads of ``mask`` that have not left the iteration."""
        function, loop = self._loops[0], self._loops[-1]
        self._mask = mask & ~(function.ended | loop.ended | loop.continued)
        knows_ended = function.knows_ended and loop.knows_ended
        self._exact = exact and knows_ended and loop.knows_continued

    def _varies(self, condition: tirx.PrimExpr) -> bool:
        """Return whether the unknown parts of a condition may differ between threads."""
        if isinstance(condition, tirx.And | tirx.Or):
            return self._varies(condition.a) or self._varies(condition.b)
        if isinstance(condition, tirx.Not):
            return self._varies(condition.a)
        if op_name(condition) in BITWISE_LOGIC and str(condition.dtype) == "bool":
            return any(map(self._varies, condition.args))
        may, must = self._values.truth(condition)
        if np.array_equal(may, must):
            return False
        return self._may_differ(condition)

    def _may_differ(self, expr: tirx.PrimExpr) -> bool:
        return self._control.divergence_of(expr) is not Divergence.UNIFORM

    def _loop(self, stmt: tirx.For | tirx.While) -> Steps:
        registers = self._control.state
        mask, exact, certain = self._mask, self._exact, self._is_certain
        self._control.enter_loop(stmt)
        may_differ = any(map(self._may_differ, headers_of(stmt)))
        may_differ |= bool(self._control.of_breaks(stmt))
        self._is_certain = True
        is_certain = certain and isinstance(stmt, tirx.For)
        is_certain &= None not in map(self._values.constant, headers_of(stmt))
        self._loops.append(_Loop(mask, dict(self._barriers.waiting), is_certain))
        if isinstance(stmt, tirx.For):
            yield from self._for(stmt)
        else:
            yield from self._while(stmt)
        self._loops.pop()
        self._is_certain = certain
        self._remain(mask, exact)
        if self._may_not_run(stmt):
            self._control.join(registers)
        if may_differ:
            self._control.leave(stmt)

    def _for(self, stmt: tirx.For) -> Steps:
        for header in headers_of(stmt):
            yield from self._apply_all(self._effects_of(header))
        self._control.enter(stmt)
        begin, extent = self._values.constant(stmt.min), self._values.constant(stmt.extent)
        first = 0 if begin is None else begin
        if not self._orders(stmt):
            yield from self._together(stmt, first, extent)
            return
        mask = self._mask
        exact = self._exact and not (extent is None and self._may_differ(stmt.extent))
        self._exits.append([])
        phases, next_number = self._phases.counts, first
        registers: list[dict[Any, bytes]] = []
        """Those at the begin of each iteration."""
        for number in self._followed(stmt, first, extent):
            if number > next_number:
                self._phases.join(phases)
                if not _repeat([*registers, self._values.registers], number - next_number):
                    self._values.lose_stored(stmt)
            registers.append(self._values.registers)
            next_number = number + 1
            if begin is not None:
                self._values.fix(stmt.loop_var, number)
            if extent is None and (number > first or self._may_not_run(stmt)):
                self._leave(stmt, number == first)
            yield from self._iteration(stmt, mask, exact)
        self._values.forget(stmt.loop_var)
        self._end_loop(phases)

    def _followed(self, stmt: tirx.For, first: int, extent: int | None) -> list[int]:
        """Return the iterations of a loop that are followed; those of loops of different threads
        are equal."""
        self._visits[stmt] += 1
        equal = tvm.ir.structural_equal
        loops = [loop for loop in self._waiting_loops if equal(loop.extent, stmt.extent)]
        loops = loops if stmt in loops else [stmt]
        depth, values = len(self._exits) - 2, self._values
        key = (loops[0], first, extent, depth, self._visits[stmt])
        if key not in self._followed_iterations:
            self._followed_iterations[key] = [
                *followed_iterations(loops, first, extent, depth, values, self._counts_phases)
            ]
        return self._followed_iterations[key]

    def _end_loop(self, phases: Counts) -> None:
        """Continue after a loop that may have ended in several places, with the phases of mbarriers
        before it."""
        exits = self._exits.pop()
        self._state = _join(self._state, *exits)
        if exits:
            self._phases.join(phases)

    def _iteration(self, stmt: tirx.For | tirx.While, mask: np.ndarray, exact: bool) -> Steps:
        """Follow an iteration by those threads of ``mask`` that have not left the loop."""
        loop = self._loops[-1]
        loop.continued, loop.knows_continued, loop.skips = np.False_, True, []
        self._remain(mask, exact)
        loop.mask, phases = self._mask, self._phases.counts
        yield from self._inside(stmt, 0, stmt.body)
        self._state = _join(self._state, *loop.skips)
        if loop.skips:
            self._phases.join(phases)

    def _leave(self, stmt: tirx.For | tirx.While, is_first: bool) -> None:
        """Record that a loop may end before its next iteration."""
        self._barriers.require_equal(self._loops[-1].waiting)
        self._exits[-1].append(self._without(stmt.body, self._state) if is_first else self._state)

    def _without(self, stmt: tirx.Stmt, state: _State) -> _State:
        """Return ``state`` where ``stmt`` does not run.

        What waits for bulk loads runs if the statement that issues them does. So if it does not
        run, none is in flight.
        """
        if not self._awaits(stmt):
            return state
        threads = threads_of(self._mask)
        return {
            key: order.after_end(p, threads) if p.access.end == LOAD else p
            for key, p in state.items()
        }

    def _awaits(self, stmt: tirx.Stmt) -> bool:
        leaves = nodes_in(stmt, tirx.Evaluate)
        return any(isinstance(e, Await) for leaf in leaves for e in self._effects_of(leaf))

    def _together(self, stmt: tirx.For, first: int, extent: int | None) -> Steps:
        """Follow all iterations of a loop without a barrier at once."""
        mask, number = self._mask, extent
        value = self._values.value(stmt.extent)
        if extent is None:
            number = _INNER if value is None else max(0, int(value.max()))
        if number == 0:
            return
        self._values.lose_stored(stmt)
        certain, self._is_certain = self._is_certain, False  # the iterations have no order
        spread = self._values.spread(stmt.loop_var, range(first, first + number))
        if spread and extent is None and value is not None:
            index = self._values.value(stmt.loop_var)
            self._mask = mask & (index < first + value)
        yield from self._inside(stmt, 0, stmt.body)
        if spread:
            self._values.close(stmt.loop_var)
            self._mask = mask
            if value is None or self._values.constant(stmt.min) is None:
                yield from self._inside(stmt, 0, stmt.body)
        self._mask, self._is_certain = mask, certain

    def _while(self, stmt: tirx.While) -> Steps:
        mask = self._mask
        exact = self._exact and not self._may_differ(stmt.condition)
        self._exits.append([])
        phases = self._phases.counts
        for number in range(UNKNOWN):
            yield from self._apply_all(self._effects_of(stmt.condition))
            self._leave(stmt, number == 0)
            yield from self._iteration(stmt, mask, exact)
        self._end_loop(phases)

    # Effects

    def _apply_all(self, effects: Iterable[Effect]) -> Steps:
        self._number += 1
        for number, effect in enumerate(effects):
            yield from self._apply(effect, number)

    def _apply(self, effect: Effect, number: int) -> Steps:
        threads = threads_of(self._mask)
        match effect:
            case Access():
                self._access(effect, number)
            case Barrier():
                yield from self._barrier(effect, threads)
            case SyncWarp():
                whole = whole_warps_of(threads)
                self._change(lambda p: order.after_sync_warp(p, whole))
            case Arrive():
                self._arrive(self._slots(effect.barrier), threads)
            case Await():
                yield from self._await(self._slots(effect.barrier), threads, effect.parity)
            case Commit() | Complete():
                self._group(effect, threads)
            case Describe():
                self._footprints.describe(effect)
            case Exit():
                self._jump(effect.name)
            case Use():
                self._use(effect, threads)
            case Publish():
                self._publish(threads)

    def _until(self, may_continue: Callable[[], bool]) -> Steps:
        """Stop threads until other ones let them continue. Where the path of the threads is not
        known, the statements are followed in the order of the text."""
        if self._follows_text or not self._is_path_known:
            return
        while not may_continue():
            yield
        self._number += 1

    @property
    def _is_path_known(self) -> bool:
        """True if all conditions and iterations around the place are known in each thread."""
        is_certain = all(loop.is_certain and not loop.skips for loop in self._loops)
        return is_certain and self._is_certain and not any(self._exits[1:])

    def _access(self, access: Access, number: int) -> None:
        path, data = tuple(self._path), data_of(access.pointer)
        if access.mode & WRITE:
            self._written.add(data)
        elif self._returned and data not in self._written and access.product is None:
            self._refuse_early_read(access, path)
        footprint = self._footprints.of(access, self._mask)
        if footprint is None:
            return
        slots = self._slots(access.barrier) if access.barrier is not None else frozenset()
        is_load = access.end == LOAD
        if is_load and not footprint.by_warp and footprint.overlap(footprint, False):
            self._refuse_repeated_copy("load", len(footprint.makers), _name(access), path)
        if access.target is not None:
            target, *elements = access.target
            if self._is_stored_repeatedly(*elements):
                self._refuse_repeated_copy("store", len(footprint.makers), target.name, path)
        # Whether every wait before a load may return at once.
        is_early = is_load and bool(self._guards) and self._guards <= self._returned.keys()
        for before in self._state.values():
            if not isinstance(before.access, Access):
                continue
            if before.statement == self._number and _is_ordered(before.access, access):
                continue
            is_unguarded = is_early or (is_load and before.statement > self._awaited)
            if order.conflicts(before, access, footprint, frozenset() if is_unguarded else slots):
                warps, pair = before.warps | footprint.warps, _pair(before.access, access)
                waits = before.barrier | before.published | (self._guards if is_early else slots)
                returned = next((w for s, w in self._returned.items() if s in waits), None)
                missing = Missing(before.place, path, warps, pair, tile=_name(access))
                raise Found(replace(missing, is_awaited=before.ended, returned=returned))
        if footprint.repeats:
            raise Found(Missing(path, path, footprint.warps, _pair(access, access)))
        key = (path[-1].stmt, number, id(footprint))
        warps, count = footprint.warps, self._values.warps
        new = order.new(access, footprint, path, warps, count, slots, self._number)
        if is_load:
            new, self._has_loaded = replace(new, guards=self._guards), True
        self._state = {**self._state, key: new}

    def _is_stored_repeatedly(self, first: tirx.PrimExpr, size: tirx.PrimExpr) -> bool:
        """Return whether several threads certainly store some of ``size`` elements from ``first``
        on."""
        threads = threads_of(self._mask)
        unknown = nodes_in(first, tirx.BufferLoad, tirx.Call)
        if not self._exact or any(map(self._may_differ, unknown)):
            return False
        (begins,), samples = self._values.places(first)
        if begins is None:
            return False
        begins = np.broadcast_to(begins, (len(threads), *begins.shape[1:]))[threads]
        distances = np.diff(np.sort(begins, axis=0), axis=0)
        overlap = (distances < (self._values.constant(size) or 1)).any(axis=0, keepdims=True)
        return bool(overlap.all(axis=tuple(samples)).any())

    def _refuse_repeated_copy(self, verb: str, threads: int, name: str, path: Path) -> None:
        """Refuse bulk copies to one place by several threads."""
        what = f"{threads} threads {verb} the same part of {name}"
        legal = f"a {verb} by one thread, such as in if tx == 0"
        raise Found(MisplacedBarrier(path, "bulk copy", what, legal, ((verb, path),)))

    def _refuse_early_read(self, access: Access, path: Path) -> None:
        """Refuse a read before the first write if the wait between both returns at once."""
        wait = next(reversed(self._returned.values()))
        what = f"a read of {_name(access)} before its first write, because a wait returns at once"
        legal = "the other parity: a wait for parity 1 of a new mbarrier returns at once"
        places = (("wait", wait), ("read", path))
        raise Found(MisplacedBarrier(path, "shared memory", what, legal, places))

    def _barrier(self, barrier: Barrier, threads: np.ndarray) -> Steps:
        if barrier.count is None:
            threads = threads_of(self._reaching)
        arrival = Arrival(threads, tuple(self._path), barrier, self._number)
        arrivals = self._barriers.arrive(arrival, self._exact)
        if not arrivals:
            waiting = self._barriers.waiting
            yield from self._until(lambda: arrival not in waiting.get(barrier.number, ()))
            return
        meeting = np.logical_or.reduce([a.threads for a in arrivals])
        warps, earlier = warps_of(meeting), arrivals[:-1]
        for wait in self._blocked:
            if (wait.threads & meeting).any():
                wait.behind = wait.behind | meeting
                wait.barrier = wait.barrier or arrivals[-1]

        def pass_barrier(p: Pending) -> Pending:
            late = (a.statement < p.statement for a in earlier if p.warps & warps_of(a.threads))
            return p if any(late) else order.after_barrier(p, warps)

        self._phases.share(meeting)
        if barrier.number:
            self._require_own_number(arrivals, warps)
            self._barriers.warps.setdefault(barrier.number, set()).add(warps)
        self._change(pass_barrier)
        if barrier.number:
            first, key = arrivals[0], (barrier.number, warps)
            new = order.new(first.barrier, None, first.path, warps, self._values.warps)
            self._state = {**self._state, key: order.after_barrier(new, warps)}
        self._drop_known()

    def _require_own_number(self, arrivals: list[Arrival], warps: int) -> None:
        """Require that no other warps may still be at a barrier with this number. One that TileLang
        inserted may be replaced by a barrier with another number."""
        first, barrier = arrivals[0], arrivals[0].barrier
        for p in self._state.values():
            before = p.access
            if not isinstance(before, Barrier) or before.number != barrier.number:
                continue
            if p.warps == warps or not self._are_unaware(p, warps):
                continue
            for path, op in ((p.place, before.op), (first.path, barrier.op)):
                if not op:
                    raise Found(MisplacedBarrier(path, op, "", "", ()))
            both = p.warps | warps
            raise Found(Missing(p.place, first.path, both, barrier.op, number=barrier.number))

    def number_for(self, warps: int) -> int | None:
        """Return a number for a barrier of these warps that no others have; None if there is none.
        TileLang's templates have the numbers below 3."""
        own = {n for n, sets in self._barriers.warps.items() if sets == {warps}}
        leaves = nodes_in(self._func.body, tirx.Evaluate, tirx.BufferStore, tirx.Bind)
        effects = (effect for leaf in leaves for effect in self._effects_of(leaf))
        used = {effect.number for effect in effects if isinstance(effect, Barrier)}
        return min(set(NUMBERS[3:]) - (used - own), default=None)

    def _slots(self, barrier: Any) -> Slots:
        """Return the mbarriers that an operand may name; number -1 stands for all of a buffer."""
        data, first = mbarrier_of(barrier)
        (index,), samples = self._values.places(first)
        if index is None:
            return frozenset({(data, -1)})
        index = index[tuple(slice(samples.get(axis)) for axis in range(index.ndim))]
        return frozenset((data, int(n)) for n in np.unique(index))

    def _arrive(self, slots: Slots, threads: np.ndarray) -> None:
        self._require_reached(slots, threads)
        self._phases.arrive(slots, threads, self._is_path_known)
        self._arrived |= slots
        warps, whole = warps_of(threads), whole_warps_of(threads)

        def publish(p: Pending) -> Pending:
            makers = order.rows_of(p, p.warps)
            known = (p.some[makers] & np.uint32(whole)) | (p.all[makers] & np.uint32(warps))
            known |= threads[list(p.alone)].any()
            if _meet(p.guards, slots):
                p = replace(p, released=p.released | warps)
            return replace(p, published=p.published | slots) if known.all() else p

        self._change(publish)

    def _require_reached(self, slots: Slots, threads: np.ndarray) -> None:
        """Refuse arrivals after a barrier where threads meet those that wait for the arrivals."""
        for wait in self._blocked:
            if wait.barrier is None or not _meet(wait.slots, slots):
                continue
            if not (threads & ~wait.behind).any():
                at, here = wait.barrier, tuple(self._path)
                what = "threads wait for an mbarrier before it, at which others arrive after it"
                places = (("wait", wait.path), ("barrier", at.path), ("arrival", here))
                legal = "the arrival before the barrier, or the wait after it"
                raise Found(MisplacedBarrier(at.path, at.barrier.op, what, legal, places))
        self._blocked = [w for w in self._blocked if not _meet(w.slots, slots)]

    def _await(self, slots: Slots, threads: np.ndarray, expr: tirx.PrimExpr) -> Steps:
        parity = self._values.value(expr)
        if parity is not None and parity.size == len(parity):
            parity = np.broadcast_to(parity.ravel(), len(threads))
        own = parity if parity is None or parity.ndim > 1 else parity[threads]
        yield from self._until(lambda: self._phases.may_end(slots, own))
        if own is not None and not own.any() and not _meet(self._arrived, slots):
            self._blocked.append(_Blocked(slots, threads, tuple(self._path)))
        is_known = self._exact and parity is not None and parity.ndim == 1
        returned = self._phases.wait(slots, threads, parity if is_known else None)
        self.is_vague |= own is None or any(number < 0 for _, number in slots)
        self._awaited = self._number
        if self._has_loaded:
            self._guards, self._has_loaded = frozenset(), False
        self._guards |= slots
        for slot in slots:
            self._returned.pop(slot, None)
            if returned.any():
                self._returned[slot] = tuple(self._path)
        early = warps_of(returned)
        proves = threads & ~returned

        def join(p: Pending) -> Pending:
            loaded = p.access.end == LOAD and _meet(p.barrier, slots)
            if loaded and p.released & early:
                p = order.repeated(p, p.released & early)
            is_ended = proves.any() and (loaded or _meet(p.published, slots))
            return order.after_end(p, proves) if is_ended else p

        self._change(join)
        self._drop_known()

    def _group(self, effect: Commit | Complete, threads: np.ndarray) -> None:
        pending = self._values.constant(effect.pending) if isinstance(effect, Complete) else 0

        def change(p: Pending) -> Pending:
            if p.ended or p.access.end != effect.kind:
                return p
            if not threads[p.footprint.threads].any():
                return p
            if isinstance(effect, Commit):
                return replace(p, groups=p.groups + 1)
            if pending is None or (p.groups <= pending and (effect.kind == COPY or pending)):
                return p
            own = np.uint32(1) << np.arange(self._values.warps, dtype=np.uint32)
            return replace(p, some=p.some | own, ended=True)

        self._change(change)

    def _jump(self, name: str) -> None:
        """Follow threads that leave an iteration. Where the conditions around the jump are known in
        each thread, the threads of the mask leave. Elsewhere all threads or none of them leave, or
        it is unknown which ones remain. A thread that may have continued before a break remains."""
        loop = self._loops[-1]
        if name in RETURN:
            self._return()
            return
        is_certain = self._is_certain and not (name in BREAKS and loop.skips)
        if not is_certain:
            self._barriers.require_equal(loop.waiting)
            (self._exits[-1] if name in BREAKS else loop.skips).append(self._state)
        is_known = is_certain or (self._exact and bool((self._mask == loop.mask).all()))
        leave = self._mask if is_certain else np.False_
        if name in BREAKS:
            loop.ended, loop.knows_ended = loop.ended | leave, loop.knows_ended and is_known
        else:
            loop.continued = loop.continued | leave
            loop.knows_continued = loop.knows_continued and is_known
        self._remain(self._mask, self._exact)

    def _return(self) -> None:
        """Follow threads that end. They are known where all conditions and iterations are.
        Elsewhere all threads end or none of them, or it is unknown which ones remain."""
        self._barriers.require_equal({})
        function = self._loops[0]
        if self._is_path_known:
            function.ended = function.ended | self._mask
        else:
            self._exits[-1].append(self._state)
            function.knows_ended &= self._exact and bool(self._reaching.all())
        self._remain(self._mask, self._exact)

    @property
    def _reaching(self) -> np.ndarray:
        """Threads and iterations that reach the current place. A barrier of the block is complete
        without the threads that have ended, and after what these did. So where all others are,
        these count as well."""
        everyone = self._mask | self._loops[0].ended
        return everyone if everyone.all() else self._mask

    def _use(self, use: Use, threads: np.ndarray) -> None:
        """Follow an access of global memory in a kernel with producers. A thread of the program is
        one of the first threads before the specialized part, and a consumer in it."""
        if not self._producers:
            return
        warps, path = warps_of(threads), tuple(self._path)
        if not warps & ~self._producers and any(is_specialized(frame.parent) for frame in path):
            use = Use()  # a load of the pipeline
        is_of_consumers = self._is_of_consumers(path)
        for p in self._state.values():
            before = p.access
            if not isinstance(before, Use) or not _is_same_buffer(before, use):
                continue
            is_moved = self._is_of_consumers(p.place) != is_of_consumers
            if is_moved and not commute(before, use) and self._are_unaware(p, warps):
                why = "because T.Pipelined moves the program's threads to other warps,"
                what = f"{_pair(before, use)}, {why}"
                raise Found(Missing(p.place, path, p.warps | warps, what))
        count, key = self._values.warps, (use, warps, is_of_consumers)
        new = order.new(use, None, path, warps, count, statement=self._number)
        self._state = {**self._state, key: new}

    def _is_of_consumers(self, path: Path) -> bool:
        """Return whether consumers execute what the program's threads do at a place: in a
        specialized part, and after it in the same iteration."""
        return any(
            is_specialized(frame.parent) or frame.index > self._specialized_in(frame.parent)
            for frame in path
        )

    def _specialized_in(self, stmt: tirx.Stmt) -> float:
        """Return the place of the first specialized part in a sequence; infinity if none is."""
        if stmt not in self._specialized_at:
            children = children_of(stmt) if isinstance(stmt, tirx.SeqStmt) else ()
            parts = (n for n, child in enumerate(children) if _has_specialized_part(child))
            self._specialized_at[stmt] = next(parts, math.inf)
        return self._specialized_at[stmt]

    def _are_unaware(self, p: Pending, warps: int) -> bool:
        """Return whether some of ``warps`` do not know what other warps did."""
        rows = order.rows_of(p, p.warps)
        return any(warps & ~(1 << int(row)) & ~int(p.all[row]) for row in rows)

    def _publish(self, threads: np.ndarray) -> None:
        """Refuse that consumers publish while some do not know what producers did."""
        warps = warps_of(threads) & ~self._producers
        for p in self._state.values():
            own = replace(p, warps=p.warps & self._producers)
            if isinstance(p.access, Use) and self._are_unaware(own, warps):
                what = "an access of global memory by producer threads, and what consumers publish,"
                raise Found(Missing(p.place, tuple(self._path), p.warps | warps, what, True))

    def _change(self, change: Callable[[Pending], Pending]) -> None:
        self._state = {key: change(p) for key, p in self._state.items()}

    def _drop_known(self) -> None:
        self._state = {
            key: p for key, p in self._state.items() if not order.is_known(p, self._all_warps)
        }


def _repeat(states: list[Any], count: int) -> bool:
    """Return whether states repeat, and the last one is that after ``count`` further ones, too."""
    return any(
        count % period == 0 and states[period:] == states[:-period]
        for period in range(1, len(states) // 2 + 1)
    )


def _has_effect(stmt: tirx.Stmt, kind: type[Effect]) -> bool:
    leaves = nodes_in(stmt, tirx.Evaluate)
    return any(isinstance(e, kind) for leaf in leaves for e in effects_of(leaf, set()))


def _is_ordered(before: Access, after: Access) -> bool:
    """Return whether two accesses of one statement need no barrier: a function makes both and
    orders them, or each thread accesses one element twice, as in ``a[i] = a[i] + 1``."""
    if after.in_call:
        return True
    first, second = before.pointer, after.pointer
    if not (hasattr(first, "buffer") and hasattr(second, "buffer")):
        return False
    same = first.buffer.same_as(second.buffer)
    return same and tvm.ir.structural_equal(first.indices, second.indices)


def _has_specialized_part(stmt: tirx.Stmt) -> bool:
    return any(map(is_specialized, nodes_in(stmt, tirx.AttrStmt)))


def _is_same_buffer(a: Use, b: Use) -> bool:
    return a.data is not None and b.data is not None and a.data.same_as(b.data)


def _is_same_branch(a: tirx.Stmt, b: tirx.Stmt) -> bool:
    """Return whether both statements are branches without a second case and with one condition,
    which the first one does not change."""
    if not isinstance(a, tirx.IfThenElse) or not isinstance(b, tirx.IfThenElse):
        return False
    if a.else_case is not None or b.else_case is not None:
        return False
    loaded = {load.buffer.data for load in nodes_in(a.condition, tirx.BufferLoad)}
    stored = {store.buffer.data for store in nodes_in(a.then_case, tirx.BufferStore)}
    return not loaded & stored and tvm.ir.structural_equal(a.condition, b.condition)


def _meet(a: Slots, b: Slots) -> bool:
    if a & b:
        return True
    return any(data is other and -1 in (n, m) for data, n in a for other, m in b)


def _pair(before: Access | Use, after: Access | Use) -> str:
    names = {1: "read", 2: "write", 3: "access", 4: "atomic access"}
    by = f"by a {before.end}" if before.end else "by another thread"
    first, second = (f"a {names[a.mode]} of {_name(a)}" for a in (before, after))
    return f"{second} after {first} {by}"


def _name(access: Access | Use) -> str:
    if isinstance(access, Use):
        return "global memory" if access.data is None else access.data.name
    if access.product is not None:
        return "an operand"
    return data_of(access.pointer).name


def _join(*states: _State | None) -> _State:
    """Return the state after one of several paths."""
    joined: _State = {}
    for state in states:
        for key, p in (state or {}).items():
            joined[key] = order.join(joined[key], p) if key in joined else p
    return joined
