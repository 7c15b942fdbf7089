"""Timeline of one schedule: runs and waits of blocks, signals, and transfers between ranks.

Time is logical: it counts accesses to global memory and changes of state, in the order of this
schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...builtins.signals import signal
from ...builtins.spec import declaration_of
from ..machine.machine import Machine
from ..machine.streams import Coroutine, Launch
from ..memory.memory import Tensor
from .errors import SimulationError

_SIGNAL = declaration_of(signal).text


@dataclass
class Wait:
    """A wait of a block until ``end``; None if it does not end."""

    start: int
    text: str
    end: int | None = None


@dataclass(eq=False)
class Bar:
    """A block of a launch, or work of a stream, from its first step to its last."""

    rank: int
    label: str
    short: str
    group: str
    """``blocks``, or the name of the stream."""
    epoch: int
    start: int
    end: int | None = None
    waits: list[Wait] = field(default_factory=list)
    failed_at: int | None = None


@dataclass
class Mark:
    """A change of a flag by a bar, at a time."""

    bar: Bar
    time: int
    text: str


@dataclass
class Arrow:
    """A signal and a wait that it ended."""

    signal: Mark
    bar: Bar
    time: int


@dataclass
class Transfer:
    """An access of a bar to the memory of another rank."""

    bar: Bar
    time: int
    peer: int
    writes: bool
    text: str


@dataclass
class Timeline:
    """One schedule.

    Attributes:
        fault: the fault that ended the schedule, or None.
        other: the earlier one of two conflicting accesses, or None.
    """

    name: str
    world_size: int
    seed: int
    end: int
    bars: list[Bar]
    signals: list[Mark]
    arrows: list[Arrow]
    transfers: list[Transfer]
    fault: SimulationError | None
    other: Mark | None


class Recorder(Machine):
    """Machine that records when its blocks run and wait. Its memory logs the accesses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._bars: dict[Coroutine, Bar] = {}
        self._by_agent: dict[int, list[Bar]] = {}
        self._noted: list[int] = []
        """Events before each change of state."""

    def _now(self) -> int:
        self._noted.append(len(self.memory.events.what))
        return len(self.memory.events.what) + len(self._noted)

    def _advance(self, coroutine: Coroutine) -> None:
        bar = self._bars.get(coroutine) or self._open(coroutine)
        try:
            super()._advance(coroutine)
        except SimulationError:
            bar.failed_at = bar.end = self._now()
            raise
        if coroutine.waiting is not None:
            bar.waits.append(Wait(self._now(), coroutine.waiting.text()))

    def _pick(self) -> Coroutine | None:
        held = list(self._held)
        picked = super()._pick()
        for coroutine in held:
            if coroutine.waiting is None:
                self._bars[coroutine].waits[-1].end = self._now()
        return picked

    def _finish(self, coroutine: Coroutine) -> None:
        self._bars[coroutine].end = self._now()
        super()._finish(coroutine)

    def _open(self, coroutine: Coroutine) -> Bar:
        work, at = coroutine.work, self._by_agent.setdefault(coroutine.order.base, [])
        if isinstance(work, Launch):
            number = coroutine.frame.block.number
            names = f"block {number}", str(number), "blocks"
        else:
            names = work.title, work.title.split(" (")[0], str(work.stream)
        bar = Bar(work.stream.rank, *names, work.epoch, self._now())
        self._bars[coroutine] = bar
        at.append(bar)
        return bar

    def timeline(self, name: str, seed: int, fault: SimulationError | None = None) -> Timeline:
        """Return the recorded timeline, which ``fault`` ended if it is given."""
        marks: dict[int, Mark] = {}
        arrows = list(self._arrows(marks))
        signals = sorted(marks.values(), key=lambda m: m.time)
        other = self._mark(fault.event) if fault is not None and fault.event else None
        return Timeline(
            name, self.world_size, seed, self._now(), list(self._bars.values()), signals, arrows,
            list(self._transfers()), fault, other,
        )  # fmt: skip

    def _arrows(self, marks: dict[int, Mark]) -> Iterator[Arrow]:
        """Yield an arrow from each signal to the first wait that it ends; fill ``marks``."""
        what = self.memory.events.what
        for tensor in dict.fromkeys(t for of_ranks in self.tensors.values() for t in of_ranks):
            for flat, changes in tensor.changes.items():
                waits = tensor.waits.get(flat, [])
                if not waits and all(what[c.event][0] != _SIGNAL for c in changes):
                    continue
                for change in changes:
                    marks[change.event] = self._mark(change.event, change.before, change.after)
                yield from self._served([c.event for c in changes], [w.event for w in waits], marks)

    def _served(
        self, changes: list[int], waits: list[int], marks: dict[int, Mark]
    ) -> Iterator[Arrow]:
        """Yield the arrows to waits: from the changes since the previous wait, else from the last
        change before it."""
        begin = 0
        for wait in sorted(waits):
            end = bisect_right(changes, wait)
            for event in changes[min(begin, max(end - 1, 0)) : end]:
                yield Arrow(marks[event], self._bar(wait), self._time(wait))
            begin = end

    def _transfers(self) -> Iterator[Transfer]:
        events = self.memory.events
        ranks = self.memory.layout.place(events.agent[: len(events.what)])[0]
        for event, (_, _, tensor, key, _, writes) in enumerate(events.what):
            if tensor is None or not tensor.symmetric or _is_word(tensor, key):
                continue
            for peer in np.unique(np.arange(tensor.shape[0])[key[0]]):
                if peer != ranks[event]:
                    yield Transfer(
                        self._bar(event), self._time(event), int(peer), writes,
                        self.memory.describe(event),
                    )  # fmt: skip

    def _mark(self, event: int, before: Any = None, after: Any = None) -> Mark:
        text = self.memory.describe(event)
        if before is not None:
            text += f": {before} -> {after}"
        return Mark(self._bar(event), self._time(event), text)

    def _bar(self, event: int) -> Bar:
        """Return the bar that made an event."""
        agent, layout = int(self.memory.events.agent[event]), self.memory.layout
        bars, time = self._by_agent[agent - (agent - 1) % layout.stride], self._time(event)
        return bars[max(0, bisect_right([b.start for b in bars], time) - 1)]

    def _time(self, event: int) -> int:
        return event + bisect_right(self._noted, event)


def _is_word(tensor: Tensor, key: Any) -> bool:
    """Return whether the key is one word that was accessed atomically."""
    if not all(np.ndim(k) == 0 and not isinstance(k, slice) for k in key):
        return False
    return int(np.ravel_multi_index(tuple(int(k) for k in key), tensor.shape)) in tensor.changes
