"""Machine whose steps and choices a search decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...runtime.trace.trace import Trace
from ..machine.block import Frame
from ..machine.machine import Machine
from ..machine.steps import Waiting
from ..machine.streams import Coroutine, Stream, Work
from ..memory.history import Entry
from ..memory.memory import Memory, Tensor
from ..report.errors import SimulationError
from ..report.timeline import Recorder
from .polling import Polling, PollStep, reads_of, state_of
from .search import ARRIVE, READ, WRITE, CutShort, Footprint, Process, Search, Snapshot, StepEffects


class ExploredMemory(Memory):
    """Memory whose choices a search decides."""

    machine: ExploringMachine

    def choose_value(self, entries: Sequence[Entry], oldest: Callable[[], int]) -> int:
        """Choose the newest value or, in other schedules, an older one.

        If the store that replaced a value does not happen before the load, a schedule in which the
        load is earlier returns that value, so this one need not.
        """
        newest = len(entries) - 1
        past = self.machine.past_of_step(loads=True)
        others = [
            at
            for at in range(newest - 1, oldest() - 1, -1)
            if self.machine.search.is_past(entries[at + 1].event, past)
        ]
        return [newest, *others][self.machine.search.choose(1 + len(others))]

    def choose_place(self, events: Sequence[int]) -> int | None:
        """Choose to land last or, in other schedules, before an earlier change."""
        past = self.machine.past_of_step()
        others = [event for event in events if self.machine.search.is_past(event, past)]
        return [None, *others][self.machine.search.choose(1 + len(others))]


class ExploringMachine(Machine):
    """One schedule of one plan, which a search decides.

    Threads of a block in different branches are scheduled on their own, and a wait is a step of its
    own, which is possible when its condition is true.
    """

    memory_class = ExploredMemory
    pauses_at_waits = True
    search: Search

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory.machine = self
        self._processes: dict[Coroutine, Process] = {}
        self._started: dict[Work, int] = defaultdict(int)
        self._parents: dict[Coroutine, Coroutine] = {}
        """Blocks of the threads that are scheduled on their own."""
        self._parts: dict[Coroutine, set[Coroutine]] = {}
        """Threads scheduled on their own, by the block that waits for them."""
        self._forks: dict[Process, int] = defaultdict(int)
        self._ends: dict[Stream, list[int]] = defaultdict(list)
        """Steps in which blocks of each stream ended."""
        self._polling: dict[Process, Polling] = {}
        self._names: dict[Tensor, tuple] = {}
        self._tensors: dict[tuple, Tensor] = {}
        self._poisoned: dict[Tensor, np.ndarray] = {}
        """Uninitialized elements of each tensor at the start."""
        self._current: Coroutine
        self._first = 0
        """Number of the first access of the current step."""
        self._sync: Footprint = {}
        self._phases: dict[tuple, int] = {}
        self._guard: Waiting | None = None
        self._has_ended = False

    def follow(self, search: Search) -> None:
        """Begin the next schedule of a search."""
        self.search = search
        search.restart()
        self._numbers = {work: number for number, work in enumerate(self._enqueued)}
        for name, of_ranks in self.every_tensor().items():
            for rank, tensor in enumerate(of_ranks):
                self._tensors[self._names.setdefault(tensor, (name, rank))] = tensor
        for tensor in self._names:
            if tensor.may_be_poison:
                self._poisoned[tensor] = tensor.poison.copy()
        self._crowded = {r for r in range(self.world_size) if self._may_be_crowded(r)}

    def _may_be_crowded(self, rank: int) -> bool:
        """Return whether the streams of a rank may need more SMs at a time than it has."""
        streams = [s.items for s in self.streams if s.rank == rank]
        works = [[i.blocks for i in of if isinstance(i, Work) and i.takes_room] for of in streams]
        return sum(max(blocks, default=0) for blocks in works) > self.resident_blocks

    def name_of(self, tensor: Tensor) -> tuple:
        """Return a name of a tensor that is the same in all schedules."""
        return self._names[tensor]

    def past_of_step(self, loads: bool = False) -> int:
        """Return the steps that happen before what the current step does now.

        Args:
            loads: whether the last access of the step is what it does now.
        """
        process = self._processes[self._current]
        return self.search.past_of(process, self._footprint(without_last=loads))

    def fork(self, parts: Sequence[tuple[Iterator[Any], Frame]]) -> Waiting:
        """Schedule these threads of the current block on their own."""
        block = self._current
        process = self._processes[block]
        self._forks[process] += 1
        left: set[Coroutine] = set()
        for number, (steps, frame) in enumerate(parts):
            part = Coroutine(block.name, block.work, block.order, frame, steps, block.pace)
            left.add(part)
            self._ready.append(part)
            self._parents[part] = block
            self._processes[part] = own = (*process, self._forks[process], number)
            self.search.causes[own].append(self.search.now)
        self._parts[block] = left
        return Waiting(lambda: not left, lambda: "")

    def note_sync(self, name: tuple, arrives: bool, phase: int) -> None:
        self._sync[name] = self._sync.get(name, 0) | (ARRIVE if arrives else READ)
        self._phases.setdefault(name, phase)

    def order_parts(self, parts: list) -> None:
        """Keep the order: an access that observes a part of a copy is a race in any order."""

    def order_words(self, words: list) -> None:
        for at in range(len(words) - 1):
            words.insert(at, words.pop(at + self.search.choose(len(words) - at)))

    def _pick(self) -> Coroutine | None:
        self._name_processes()
        able = {
            self._processes[c]: c
            for c in (*self._ready, *self._held)
            if c.waiting is None or c.waiting.ready()
        }
        process = self.search.pick(able, self._unchanged)
        if process is None:
            if self._ready or self._held:
                raise self._deadlock()
            return None
        coroutine = able[process]
        self._guard = coroutine.waiting
        if coroutine.waiting is not None:
            coroutine.waiting = None
            self._held.remove(coroutine)
            self._ready.append(coroutine)
        self._parts.pop(coroutine, None)
        coroutine.frame.newest = False
        return coroutine

    def _name_processes(self) -> None:
        """Number the blocks and streams that the last step started."""
        for coroutine in self._ready:
            if coroutine not in self._processes:
                work = coroutine.work
                process = self._numbers[work], self._started[work]
                self._started[work] += 1
                self._processes[coroutine] = process
                if self.search.depth:
                    causes = *self._ends[work.stream], self.search.now
                    self.search.causes[process] += causes

    def _unchanged(self, snapshot: Snapshot) -> bool:
        return all(self._tensors[name].data[key].tobytes() == v for name, key, v in snapshot)

    def _advance(self, coroutine: Coroutine) -> None:
        self._current, self._first = coroutine, len(self.memory.events.what)
        self._sync, self._phases, self._has_ended = {}, {}, False
        coroutine.spun_at = -1
        fences, rank = self.memory.sc_fences, coroutine.work.stream.rank
        super()._advance(coroutine)
        spun = coroutine.spun_at >= 0
        self._check_polling(coroutine, spun)
        waiting = coroutine.waiting
        looked_in_vain = waiting is not None and waiting.word is not None and not waiting.ready()
        footprint = self._footprint(without_last=looked_in_vain)
        if self.memory.sc_fences is not fences:
            footprint[("sc fences",)] = WRITE
        if self._has_ended and rank in self._crowded:
            footprint["room", rank] = WRITE
        self._note_poison(coroutine, footprint)
        self.search.executed(self._executed(footprint, spun))

    def _executed(self, footprint: Footprint, spun: bool) -> StepEffects:
        guard, waiting = None, self._guard
        if waiting is not None and waiting.word is not None:
            tensor, index = waiting.word
            guard = (*self._names[tensor], int(np.ravel_multi_index(index, tensor.shape)))
        elif waiting is not None:
            guard = next((name for name, kind in self._sync.items() if kind & READ), None)
        holds = (lambda value: True) if waiting is None else waiting.holds
        before = {**self._values_before(), **self._phases}
        return StepEffects(footprint, before, guard, holds, self._first, spun)

    def _footprint(self, without_last: bool) -> Footprint:
        """Return what the current step has accessed so far."""
        footprint, events = dict(self._sync), self.memory.events
        for event in range(self._first, len(events.what) - without_last):
            if events.scope[event]:
                _, _, tensor, key, _, writes = events.what[event]
                for flat in np.asarray(tensor.flat[key]).ravel():
                    word = (*self._names[tensor], int(flat))
                    footprint[word] = footprint.get(word, 0) | (WRITE if writes else READ)
        return footprint

    def _values_before(self) -> dict[tuple, Any]:
        """Return the value of each word before its first change in the current step."""
        before: dict[tuple, Any] = {}
        events = self.memory.events
        for event in range(len(events.what) - 1, self._first - 1, -1):
            _, _, tensor, key, _, writes = events.what[event]
            if writes and events.scope[event]:
                for flat in np.asarray(tensor.flat[key]).ravel():
                    changes = tensor.changes.get(int(flat), ())
                    values = [c.before for c in changes[-8:] if c.event == event]
                    if values and values[0] is not None:
                        before[(*self._names[tensor], int(flat))] = values[0]
        return before

    def _note_poison(self, coroutine: Coroutine, footprint: Footprint) -> None:
        """Make the begin of a wait depend on the stores to its word, if it was uninitialized."""
        if coroutine.waiting is not None and coroutine.waiting.word is not None:
            tensor, index = coroutine.waiting.word
            if tensor in self._poisoned and self._poisoned[tensor][index]:
                word = (*self._names[tensor], int(np.ravel_multi_index(index, tensor.shape)))
                footprint[word] = footprint.get(word, 0) | READ

    def _check_polling(self, coroutine: Coroutine, spun: bool) -> None:
        """End the schedule if an iteration of a polling loop changed nothing."""
        process, now = self._processes[coroutine], self.search.now
        if spun:
            self._polling.setdefault(process, Polling())
        if process not in self._polling:
            return
        polling, reads = self._polling[process], reads_of(self, self._first)
        if self._sync:
            reads = None
        polling.add(PollStep(now, reads, self.search.has_chosen(now)))
        steps = polling.repeated(state_of(coroutine)) if spun else None
        if steps is None:
            return
        snapshot = [read for step in steps for read in step.reads or ()]
        if self._unchanged(snapshot):
            if any(step.chose for step in steps):
                raise CutShort
            self.search.note_stuck(process, snapshot)

    def _finish(self, coroutine: Coroutine) -> None:
        if coroutine in self._parents:
            block = self._parents[coroutine]
            self._parts[block].discard(coroutine)
            self.search.causes[self._processes[block]].append(self.search.now)
            return
        self._has_ended = True
        self._ends[coroutine.work.stream].append(self.search.now)
        super()._finish(coroutine)

    def _deadlock(self) -> SimulationError:
        self._held = [c for c in self._held if c not in self._parts]
        return super()._deadlock()


class ExplorationRecorder(Recorder, ExploringMachine):
    """Exploring machine that records its schedule."""

    def trace(self, name: str, seed: int | None, fault: SimulationError | None = None) -> Trace:
        for span in self._spans.values():
            # A block does not wait for its own threads in branches.
            span.waits = [wait for wait in span.waits if wait.text]
        return super().trace(name, seed, fault)
