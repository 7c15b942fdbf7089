"""Scheduler of the blocks and streams of all ranks, and detection of deadlocks."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...passes.ir.ragged import ARRIVED
from ..memory.barrier_words import WordsOfBarriers
from ..memory.clock import Clock
from ..memory.memory import Memory, Tensor
from ..memory.order import Layout
from ..memory.pointed import PointedTensors
from ..report.errors import SimulationError
from .block import Block, Frame
from .group_barrier import GroupBarrier
from .steps import SPIN, Waiting
from .streams import Coroutine, Record, Stream, WaitEvent, Work

_SHOWN = 4
"""Number of blocks of a rank with waits at the same lines that a report shows."""
_SPINS = 5000
"""Iterations of all polling loops without a change of memory that count as a deadlock."""


class Machine:
    """One schedule of one plan."""

    memory_class = Memory
    pauses_at_waits = False
    """True if blocks and streams yield at each wait, even if its condition is true."""

    def __init__(
        self, world_size: int, layout: Layout, seed: int, resident_blocks: int,
        thread_names: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.world_size, self.layout, self.resident_blocks = world_size, layout, resident_blocks
        self.rng = random.Random(seed)
        self.memory = self.memory_class(layout, self.rng)
        self.memory.thread_names = thread_names
        self.tensors: dict[str, list[Tensor]] = {}
        self.named: dict[str, list[Tensor]] = {}
        """All tensors by their names in steps."""
        self.implicit: dict[Any, dict[str, list[Tensor]]] = {}
        """Implicit tensors of each rank, by kernel and name."""
        self.pointed = PointedTensors(self.memory)
        self.streams: list[Stream] = []
        self._enqueued: list[Work] = []
        self._start = Clock.start(layout.count)
        self._barriers: dict[Any, GroupBarrier] = {}
        self.barrier_words = WordsOfBarriers()
        self._ready: list[Coroutine] = []
        self._held: list[Coroutine] = []
        self._checked = -1
        self._idled = -1
        """Version of the memory when a polling loop last became idle."""
        self._active: list[list[Work]] = [[] for _ in range(world_size)]
        """Running work of the streams of each rank, in the order in which it was enqueued."""
        self._resident = [0] * world_size
        self._uneven = self.rng.random() < 0.5
        """True if some blocks are much slower than others in this schedule."""
        self.uniform: dict[tuple, tuple[int, str]] = {}
        """By launch and call of a builtin with the role ``uniform``: its first value, and the block
        that has it."""
        self.printed: list[str] = []
        """Lines that the program prints."""
        self.clipped: dict[tuple[str, str], str] = {}
        """Guarded accesses out of bounds, by tensor and line."""
        self.nan = False
        """Whether a statement that makes a NaN or an infinity is a fault."""
        self.most_blocks: int | None = None
        """Number of blocks of a launch that run; None: all."""
        self.watch: Callable[[], None] = lambda: None
        """Called after each step."""

    def block_counts(self) -> tuple[int, int, int]:
        """Return the numbers of blocks that have ended, that run, and of all blocks."""
        running = sum(work.running for work in self._enqueued)
        begun = sum(work.next for work in self._enqueued)
        return begun - running, running, sum(work.blocks for work in self._enqueued)

    def every_tensor(self) -> dict[Any, list[Tensor]]:
        """Return the tensors of the plan and the implicit ones, by unique names."""
        implicit = {(k, name): t for k, ts in self.implicit.items() for name, t in ts.items()}
        return {**self.tensors, **implicit}

    def add_stream(self, rank: int, name: str | None, items: Sequence[Any]) -> None:
        """Add a stream and what the host enqueues in it."""
        self.streams.append(Stream(rank, name, self._start, list(items)))
        self._enqueued += [item for item in items if isinstance(item, Work)]

    def barrier(self, participants: str, words: Any, block: Block) -> GroupBarrier:
        """Return the barrier at which ``block`` arrives. A grid barrier belongs to one launch."""
        key = (participants, words, block.launch if participants == "grid" else None)
        if key not in self._barriers:
            self._barriers[key] = GroupBarrier(self, participants)
        return self._barriers[key]

    def fork(self, parts: Sequence[tuple[Iterator[Any], Frame]]) -> Waiting | None:
        """Schedule these threads of a block on their own, and return a wait for their ends; or
        return None: the caller lets them take turns."""
        return None

    def note_sync(self, name: tuple, arrives: bool, phase: int) -> None:
        """Note an arrival at a barrier or mbarrier in this phase, or the end of a wait for it."""

    def order_parts(self, parts: list) -> None:
        """Choose the order in which a copy moves its parts."""
        self.rng.shuffle(parts)

    def order_words(self, words: list) -> None:
        """Choose the order in which a stream writes words."""
        self.rng.shuffle(words)

    def signals(self, tensor: Tensor) -> dict[str, str]:
        """Return the operations that change words of ``tensor`` atomically, by line."""
        lines: dict[str, str] = {}
        for work in self._enqueued:
            lines |= work.signals(tensor)
        return lines

    def run(self) -> None:
        """Run until all streams have finished.

        Raises:
            SimulationError: a fault, with the events that led to it.
        """
        with np.errstate(all="ignore"):
            self._advance_streams(self.streams)
            while (coroutine := self._pick()) is not None:
                self._advance(coroutine)
                self.watch()
        if self._held:
            raise self._deadlock()

    def _advance(self, coroutine: Coroutine) -> None:
        self._ready.remove(coroutine)
        event = next(coroutine.steps, self)
        if event is self:
            self._finish(coroutine)
        elif isinstance(event, Waiting):
            coroutine.waiting = event
            self._held.append(coroutine)
            self._checked = -1
        else:
            if event is SPIN:
                version = self.memory.version
                coroutine.spin(version)
                if coroutine.is_idle(version):
                    self._idled = version
            self._ready.append(coroutine)

    def _pick(self) -> Coroutine | None:
        version = self.memory.version
        if self._held and self._checked != version:
            self._checked = version
            for coroutine in [c for c in self._held if c.waiting.may_end()]:
                coroutine.waiting = None
                self._held.remove(coroutine)
                self._ready.append(coroutine)
        able = self._ready
        if self._idled == version:
            able = [c for c in able if not c.is_idle(version)]
        polls = not able
        if polls:
            able = self._ready
            if able and all(c.spins > _SPINS for c in able):
                raise self._deadlock()
        if not able:
            return None
        chosen = able[int(self.rng.random() * len(able))]
        if self._uneven and len(able) > 1 and self.rng.random() < 0.9:
            other = able[int(self.rng.random() * len(able))]
            if other.pace > chosen.pace:
                chosen = other
        chosen.frame.newest = polls  # all poll: they must observe the newest values
        return chosen

    def _advance_streams(self, streams: Sequence[Stream]) -> None:
        """Start the next items of these streams, which are idle, as far as their events allow."""
        pending = list(streams)
        while pending:
            stream = pending.pop()
            while stream.work is None and stream.items:
                item = stream.items[0]
                if isinstance(item, WaitEvent):
                    if item.event.clock is None:
                        break
                    stream.clock = stream.clock.joined(item.event.clock)
                    stream.polled = stream.polled.joined(item.event.polled)
                stream.items.pop(0)
                if isinstance(item, Record):
                    item.event.clock, item.event.polled = stream.clock, stream.polled
                    pending += [s for s in self.streams if s.rank == stream.rank and s.is_blocked]
                elif not isinstance(item, WaitEvent) and item.blocks:
                    item.begin()
                    active = self._active[stream.rank]
                    active.append(item)
                    active.sort(key=lambda work: work.enqueue_index)
        for rank in {s.rank for s in streams}:
            self._fill(rank)

    def _fill(self, rank: int) -> None:
        """Start blocks in the order of the launches while they fit."""
        for work in self._active[rank]:
            while work.next < work.blocks and (
                not work.takes_room or self._resident[rank] < self.resident_blocks
            ):
                self._ready.append(work.start(self, work.next, self.rng.random()))
                work.next += 1
                work.running += 1
                self._resident[rank] += work.takes_room

    def _finish(self, coroutine: Coroutine) -> None:
        work = coroutine.work
        stream, rank = work.stream, work.stream.rank
        work.ends.append(coroutine.order.end())
        work.polled.append(coroutine.order.polled)
        work.running -= 1
        self._resident[rank] -= work.takes_room
        self._fill(rank)
        if not work.running and work.next == work.blocks:
            work.end()
            self._active[rank].remove(work)
            stream.finish(work)
            self._advance_streams([stream])

    def _deadlock(self) -> SimulationError:
        lines = self._waits()
        lines += [f"  {c.name} in launch {c.work.epoch} polls in a loop" for c in self._ready]
        for rank in range(self.world_size):
            streams = [s for s in self.streams if s.rank == rank]
            if not any(s.work or s.items for s in streams):
                launched = max((s.launched for s in streams), default=0)
                lines.append(f"  rank {rank} has finished its {launched} launches")
            for stream in streams:
                lines += [f"  rank {rank}, {text}" for text in stream.blocked_by(self)]
        passed = any(c.waiting is not None and c.waiting.passed() for c in self._held)
        why = "no block or stream can continue"
        if passed:
            why = f"a counter is above the only value waited for, and {why}"
        if missing := self._missing_rows():
            why = f"{missing}\n{why}"
        waits = [c.waiting for c in self._held if c.waiting is not None]
        if obstacle := next((wait.obstacle for wait in waits if wait.obstacle), ""):
            return SimulationError("unsupported", "\n".join([obstacle, *lines]))
        return SimulationError(
            "arrival" if passed or missing else "deadlock", "\n".join([why, *lines])
        )

    def _waits(self) -> list[str]:
        """Describe the waits of all blocks and streams; of a few blocks among those of a rank that
        wait at the same lines."""
        similar: dict[Any, list[str]] = defaultdict(list)
        for held in self._held:
            if held.waiting is not None:
                places = tuple((target.op, target.loc) for target in held.waiting.targets())
                similar[held.work.stream.rank, places or held].append(f"  {held.waiting.text()}")
        lines: list[str] = []
        for (rank, _), texts in similar.items():
            lines += texts[:_SHOWN]
            if len(texts) > _SHOWN:
                more = f"{len(texts) - _SHOWN} more blocks of rank {rank}"
                lines.append(f"  {more} wait at the same lines")
        return lines

    def _missing_rows(self) -> str:
        """Describe a segment for whose rows a block waits, although fewer rows are written than
        announced and all blocks of the source have started; "" if there is none."""
        waits = [c.waiting for c in self._held if c.waiting is not None]
        awaited = {w.word[0].name for w in waits if w.word is not None}
        starting = {r for r, works in enumerate(self._active) for w in works if w.next < w.blocks}
        for tensor, *_ in self.every_tensor().values():
            if tensor.segments is not None and f"{tensor.name}_{ARRIVED}" in awaited:
                if missing := tensor.segments.missing(starting):
                    return missing
        return ""


def outputs_of(machine: Machine) -> list[dict[str, np.ndarray]]:
    """Return the tensors of each rank. If not all blocks run, elements of the tensors that the
    program writes are masked unless a block has written them."""

    def output(tensor: Tensor, rank: int) -> np.ndarray:
        part = tensor.part(rank)
        if machine.most_blocks is None or not tensor.written:
            return tensor.data[part]
        return np.ma.masked_array(tensor.data[part], tensor.writes.last[part] == 0)

    return [
        {name: output(tensors[rank], rank) for name, tensors in machine.tensors.items()}
        for rank in range(machine.world_size)
    ]
