"""Recording of one schedule as a trace.

Time is logical: it counts accesses to global memory and changes of state, in the order of this
schedule. Each access takes one step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...builtins.signals import signal
from ...builtins.spec import RELATION_TEXT, declaration_of
from ...runtime.plans.steps import name_of_stream
from ...runtime.trace.trace import Fault, Flow, Signal, Span, Trace, Transfer, Wait
from ..machine.machine import Machine
from ..machine.steps import Waiting, WaitTarget
from ..machine.streams import Coroutine, Launch
from ..memory.history import EndedWait
from ..memory.memory import Tensor
from ..memory.shadow import text_of_region
from .errors import SimulationError

_SIGNAL = declaration_of(signal).text


class Recorder(Machine):
    """Machine that records when its blocks run and wait. Its memory logs the accesses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._spans: dict[Coroutine, Span] = {}
        self._by_agent: dict[int, list[Span]] = {}
        self._targets: dict[Wait, list[WaitTarget]] = {}
        """Flags and barriers of each wait that blocked."""
        self._advanced: Span | None = None
        """Span of the last step."""
        self._arrivals: dict[tuple[Span, int], Signal] = {}
        """Last arrivals at barriers, by span and time."""
        self._barrier_flows: list[Flow] = []
        self._noted: list[int] = []
        """Events before each change of state."""

    def _now(self) -> int:
        self._noted.append(len(self.memory.events.what))
        return len(self.memory.events.what) + len(self._noted)

    def _advance(self, coroutine: Coroutine) -> None:
        self._advanced = span = self._spans.get(coroutine) or self._open(coroutine)
        try:
            super()._advance(coroutine)
        except SimulationError:
            span.failed_at = span.end = self._now()
            raise
        if coroutine.waiting is not None:
            span.waits.append(self._wait(coroutine.waiting))

    def _wait(self, waiting: Waiting) -> Wait:
        """Return the wait that begins now, for the first of its targets."""
        targets = waiting.targets()
        wait = Wait(self._now(), text=waiting.text())
        if targets:
            _aim(wait, targets[0])
        self._targets[wait] = targets
        return wait

    def _pick(self) -> Coroutine | None:
        held, now = list(self._held), len(self.memory.events.what) + len(self._noted)
        picked = super()._pick()
        for coroutine in held:
            if coroutine.waiting is None:
                self._resume(self._spans[coroutine], now)
        return picked

    def _resume(self, span: Span, now: int) -> None:
        """End the wait of a span. If it waited for a barrier, the last step was the arrival."""
        wait, last = span.waits[-1], self._advanced
        if wait.op and not wait.flag and last is not None and last is not span:
            time = now if last.end is None else int(last.end) - 1
            text = f"rank {last.rank}, {last.label} arrives last at {wait.op}"
            arrival = Signal(last, time, 1, wait.op, loc=wait.loc, text=text)
            arrival = self._arrivals.setdefault((last, time), arrival)
            self._barrier_flows.append(Flow(arrival, span, wait))
        wait.end = self._now()

    def _finish(self, coroutine: Coroutine) -> None:
        self._spans[coroutine].end = self._now()
        super()._finish(coroutine)

    def _open(self, coroutine: Coroutine) -> Span:
        work, spans = coroutine.work, self._by_agent.setdefault(coroutine.order.base, [])
        block, kernel, label, loc = None, work.title.split(" (")[0], work.title, work.loc
        if isinstance(work, Launch):
            block, kernel = coroutine.frame.block.number, work.kernel.name
            label, loc = f"block {block}", work.kernel.loc
        stream = name_of_stream(work.stream.name)
        span = Span(work.stream.rank, kernel, stream, block, label, work.epoch, loc, self._now())
        self._spans[coroutine] = span
        spans.append(span)
        return span

    def trace(self, name: str, seed: int | None, fault: SimulationError | None = None) -> Trace:
        """Return the recorded trace, which ``fault`` ended if it is given."""
        waits = self._ended_waits()
        signals: dict[int, Signal] = {}
        flows = [*self._flows(signals, waits), *self._barrier_flows]
        other = self._access(fault.event) if fault is not None and fault.event else None
        return Trace(
            name, self.world_size, "steps", self._now(), list(self._spans.values()),
            sorted([*signals.values(), *self._arrivals.values()], key=lambda s: s.time),
            flows, list(self._transfers()), seed,
            None if fault is None else Fault(fault.kind, fault.report, other),
        )  # fmt: skip

    def _ended_waits(self) -> dict[int, Wait]:
        """Return the wait of each load that ended a wait for a flag.

        The wait that blocked for this flag extends to the load. A wait that did not block is added
        to its span: it is the load alone.
        """
        waits: dict[int, Wait] = {}
        for awaited, tensor, flat in sorted(self._awaited(), key=lambda a: a[0].event):
            span, time = self._span(awaited.event), self._time(awaited.event)
            flag = f"{tensor.name}{_index(tensor, flat)}"
            op, loc = self.memory.events.what[awaited.event][:2]
            condition = f"{RELATION_TEXT[awaited.relation]} {awaited.want}"
            target_now = WaitTarget(op, loc, flag, tensor.name, awaited.seen, condition)
            wait, target = self._blocked_wait(span, time, flag) or (None, target_now)
            if wait is None:
                wait = Wait(time, text=self.memory.describe(awaited.event))
                span.waits.append(wait)
            _aim(wait, target)
            wait.end = time + 1
            waits[awaited.event] = wait
        for span in self._spans.values():
            span.waits.sort(key=lambda w: w.start)
        return waits

    def _blocked_wait(self, span: Span, time: int, flag: str) -> tuple[Wait, WaitTarget] | None:
        """Remove and return the last blocked wait for a flag before ``time``, with its target."""
        for wait in reversed(span.waits):
            if wait.start < time and wait.end is not None:
                for target in self._targets.get(wait, ()):
                    if target.flag == flag:
                        del self._targets[wait]
                        return wait, target
        return None

    def _awaited(self) -> Iterator[tuple[EndedWait, Tensor, int]]:
        """Yield the waits for flags that have ended, each with its word."""
        for tensor in self._each_tensor():
            for flat, waits in tensor.waits.items():
                yield from ((awaited, tensor, flat) for awaited in waits)

    def _each_tensor(self) -> list[Tensor]:
        return list(dict.fromkeys(t for of_ranks in self.every_tensor().values() for t in of_ranks))

    def _flows(self, signals: dict[int, Signal], waits: dict[int, Wait]) -> Iterator[Flow]:
        """Yield a flow from each signal to the first wait that it ends; fill ``signals``."""
        what = self.memory.events.what
        for tensor in self._each_tensor():
            for flat, changes in tensor.changes.items():
                awaited = tensor.waits.get(flat, [])
                if not awaited and all(what[c.event][0] != _SIGNAL for c in changes):
                    continue
                for change in changes:
                    signals[change.event] = self._access(change.event, change.before, change.after)
                for event, wait in _served([c.event for c in changes], [w.event for w in awaited]):
                    yield Flow(signals[event], self._span(wait), waits[wait])

    def _transfers(self) -> Iterator[Transfer]:
        events = self.memory.events
        ranks = self.memory.layout.place(events.agent[: len(events.what)])[0]
        for event, (op, loc, tensor, key, _, writes) in enumerate(events.what):
            if tensor is None or not tensor.symmetric or _is_word(tensor, key):
                continue
            for peer in np.unique(np.arange(tensor.shape[0])[key[0]]):
                rank = tensor.ranks[peer]
                if rank != ranks[event]:
                    yield Transfer(
                        self._span(event), self._time(event), 1, rank, writes, op,
                        tensor.name, loc, self.memory.describe(event),
                    )  # fmt: skip

    def _access(self, event: int, before: Any = None, after: Any = None) -> Signal:
        op, loc, tensor, key, _, _ = self.memory.events.what[event]
        text = self.memory.describe(event)
        if before is not None:
            text += f": {before} -> {after}"
        return Signal(
            self._span(event), self._time(event), 1, op, f"{tensor.name}{text_of_region(key)}",
            tensor.name, before, after, loc, text,
        )  # fmt: skip

    def _span(self, event: int) -> Span:
        """Return the span that made an event."""
        agent, layout = int(self.memory.events.agent[event]), self.memory.layout
        spans, time = self._by_agent[agent - (agent - 1) % layout.stride], self._time(event)
        return spans[max(0, bisect_right([s.start for s in spans], time) - 1)]

    def _time(self, event: int) -> int:
        return event + bisect_right(self._noted, event)


def _aim(wait: Wait, target: WaitTarget) -> None:
    """Set the flag or barrier of a wait."""
    wait.op, wait.loc, wait.flag, wait.tensor = target.op, target.loc, target.flag, target.tensor
    wait.seen, wait.wanted = target.seen, target.wanted


def _served(changes: list[int], waits: list[int]) -> Iterator[tuple[int, int]]:
    """Yield a change and a wait that it ended: from the changes since the previous wait, else from
    the last change before it."""
    begin = 0
    for wait in sorted(waits):
        end = bisect_right(changes, wait)
        for event in changes[min(begin, max(end - 1, 0)) : end]:
            yield event, wait
        begin = end


def _index(tensor: Tensor, flat: int) -> str:
    return text_of_region(np.unravel_index(flat, tensor.shape))


def _is_word(tensor: Tensor, key: Any) -> bool:
    """Return whether the key is one word that was accessed atomically."""
    if not all(np.ndim(k) == 0 and not isinstance(k, slice) for k in key):
        return False
    return int(np.ravel_multi_index(tuple(int(k) for k in key), tensor.shape)) in tensor.changes
