"""Merging of what the ranks recorded on GPUs into one trace.

Times are nanoseconds of the clock of a rank's own GPU until ``merge`` puts all ranks on the clock
of rank 0. They are integers: a float of 64 bits holds nanoseconds since 1970 in steps of 256.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ...builtins.spec import RELATION_TEXT
from ...passes.ir.events import decode_events
from ..host.tracer import TracedLaunch
from .trace import Clock, Flow, Phase, Signal, Span, Trace, Transfer, Wait

EVENT = np.dtype(
    [
        ("begin", "u8"), ("end", "u8"), ("flag", "u8"), ("seen", "i8"), ("wanted", "i8"),
        ("launch", "i4"), ("event", "i4"), ("block", "u4"), ("sm", "u4"),
    ]
)  # fmt: skip
"""An event in the buffer of a rank, as ``context.cuh`` declares it."""
_LEAST = 0.001
"""Shortest duration in a trace, in microseconds, for events within one step of the clock."""
_NS = 1000.0
"""Nanoseconds in a microsecond."""
HOST = "host"
"""Stream of the phases in which the host enqueues."""


@dataclass(frozen=True)
class Word:
    """An address of symmetric memory.

    Attributes:
        owner: the rank whose memory it is.
        offset: byte in the heap of this rank.
        index: index in the tensor, the rank first, such as ``[1, 0]``; "" if it is unknown.
    """

    owner: int
    offset: int
    index: str = ""


@dataclass(frozen=True)
class TimedCall:
    """A step of a plan: a ``TracedStep`` with times in place of events."""

    kind: str
    op: str
    loc: str
    stream: str
    tensor: str
    address: int
    value: int | None
    nbytes: int
    begin_ns: int
    end_ns: int
    host_ns: int


@dataclass(frozen=True)
class RankClock:
    """Offsets of the clocks of one rank, in nanoseconds.

    Attributes:
        offset: clock of its GPU minus that of rank 0.
        host_offset: clock of its host minus that of its GPU.
    """

    offset: int = 0
    error: int = 0
    host_offset: int = 0
    host_error: int = 0


@dataclass(frozen=True)
class RankRecord:
    """Records of one rank.

    Attributes:
        events: in the order of their slots; dtype ``EVENT``.
        lost: number of events for which the buffer had no room.
        launches: by number.
        words: the addresses of its events and steps that are in symmetric memory.
    """

    rank: int
    events: np.ndarray
    lost: int
    launches: Sequence[TracedLaunch]
    steps: Sequence[TimedCall] = ()
    words: dict[int, Word] = field(default_factory=dict)
    clock: RankClock = RankClock()


@dataclass(eq=False)
class _Change:
    """A signal, for the search of the wait that it ended."""

    signal: Signal
    value: int | None
    is_added: bool


@dataclass(eq=False)
class _WordWait:
    """A wait for a word."""

    span: Span
    wait: Wait
    word: tuple[int, int]
    relation: str
    seen: int | None
    wanted: int
    error: float


def merge(records: Sequence[RankRecord], name: str) -> Trace:
    """Return the trace of all ranks on the clock of rank 0, which begins at the first event."""
    return _Merge(records, name).trace()


class _Merge:
    def __init__(self, records: Sequence[RankRecord], name: str) -> None:
        self._records = records
        self._start = min((t for r in records for t in _times(r)), default=0)
        self._reached = 0.0
        clocks = [
            Clock(r.rank, *(ns / _NS for ns in (r.clock.offset, r.clock.error, r.clock.host_error)))
            for r in records
        ]
        self._trace = Trace(
            name, len(records), "us", 0.0, [], [], [], [],
            clocks=clocks, lost=[r.lost for r in records],
        )  # fmt: skip
        self._changes: dict[tuple[int, int], list[_Change]] = defaultdict(list)
        self._awaited: list[_WordWait] = []

    def trace(self) -> Trace:
        """Return the trace."""
        trace = self._trace
        for record in self._records:
            for span in _Blocks(self, record).spans():
                trace.spans.append(span)
            self._add_steps(record)
            self._add_launches(record)
        trace.spans.sort(key=lambda s: s.start)
        for span in trace.spans:
            span.waits.sort(key=lambda w: w.start)
        trace.signals.sort(key=lambda s: s.time)
        trace.transfers.sort(key=lambda t: t.time)
        trace.end = max([self._reached, *(s.time + s.duration for s in trace.signals)])
        trace.flows += self._flows()
        return trace

    def us(self, record: RankRecord, ns: int) -> float:
        """Return a time of a rank's GPU in microseconds of the trace."""
        time = (ns - record.clock.offset - self._start) / _NS
        self._reached = max(self._reached, time + _LEAST)
        return time

    def add_wait(
        self, span: Span, wait: Wait, word: Word | None, relation: str, seen: int | None,
        wanted: int,
    ) -> None:  # fmt: skip
        """Add a wait for a word to a span."""
        span.waits.append(wait)
        if word is not None:
            error = self._trace.clocks[span.rank].error
            at = word.owner, word.offset
            self._awaited.append(_WordWait(span, wait, at, relation, seen, wanted, error))

    def add_signal(self, signal: Signal, word: Word, value: int | None, is_added: bool) -> None:
        """Add a change of a word."""
        self._trace.signals.append(signal)
        self._changes[word.owner, word.offset].append(_Change(signal, value, is_added))

    def add_transfer(self, transfer: Transfer) -> None:
        """Add an access to the memory of another rank; drop one to the rank's own."""
        if transfer.peer != transfer.span.rank and 0 <= transfer.peer < len(self._records):
            self._trace.transfers.append(transfer)

    def add_phase(self, phase: Phase) -> None:
        self._trace.phases.append(phase)

    def _add_steps(self, record: RankRecord) -> None:
        for number, step in enumerate(record.steps):
            start, end = self.us(record, step.begin_ns), self.us(record, step.end_ns)
            end = max(end, start + _LEAST)
            word = record.words.get(step.address)
            flag = f"{step.tensor}{word.index if word else ''}"
            label = f"{step.op} {flag}"
            span = Span(
                record.rank, step.op, step.stream, None, label, number, step.loc, start, end
            )
            self._trace.spans.append(span)
            if step.kind == "wait":
                wanted = step.value or 0
                wait = Wait(
                    start, end, step.op, flag, step.tensor, None,
                    f"{RELATION_TEXT['reached']} {wanted}", step.loc, label,
                )  # fmt: skip
                self.add_wait(span, wait, word, "reached", None, wanted)
            elif step.kind == "write" and word is not None:
                signal = Signal(
                    span, start, end - start, step.op, flag, step.tensor, None, step.value,
                    step.loc, label,
                )  # fmt: skip
                self.add_signal(signal, word, step.value, False)
            elif step.kind == "copy" and word is not None:
                text = f"{step.nbytes} bytes"
                self.add_transfer(
                    Transfer(
                        span, start, end - start, word.owner, True, step.op, step.tensor, step.loc,
                        text,
                    )
                )  # fmt: skip
            self._add_enqueue(record, step.op, number, step.host_ns, step.loc)

    def _add_launches(self, record: RankRecord) -> None:
        for number, launch in enumerate(record.launches):
            kernel = next((e["kernel"] for e in _table(launch.table)), "kernel")
            self._add_enqueue(record, kernel, number, launch.host_ns, "")

    def _add_enqueue(
        self, record: RankRecord, kernel: str, number: int, host_ns: int, loc: str
    ) -> None:
        start = self.us(record, host_ns - record.clock.host_offset)
        name = f"enqueue {kernel}"
        self.add_phase(
            Phase(record.rank, HOST, None, name, kernel, number, start, start + _LEAST, loc)
        )

    def _flows(self) -> Iterator[Flow]:
        """Yield a flow to each wait from the signal that ended it."""
        for changes in self._changes.values():
            changes.sort(key=lambda c: c.signal.time)
        for awaited in sorted(self._awaited, key=lambda a: a.wait.start):
            ender = self._ender(awaited, self._changes.get(awaited.word, []))
            if ender is not None:
                yield Flow(ender.signal, awaited.span, awaited.wait)

    def _ender(self, awaited: _WordWait, changes: Iterable[_Change]) -> _Change | None:
        """Return the change that ended a wait: the first one after its begin with which the flag
        satisfied it, or else the last one before its end, as far as the clocks allow to say."""
        wait, value, last = awaited.wait, awaited.seen, None
        is_open = value is None or not _holds(awaited.relation, value, awaited.wanted)
        assert wait.end is not None
        for change in changes:
            error = awaited.error + self._trace.clocks[change.signal.span.rank].error
            if change.signal.time > (wait.end if is_open else wait.start) + error:
                break
            last = change
            if not is_open or change.value is None:
                continue
            if change.is_added and (value is None or change.signal.time < wait.start - error):
                continue
            value = change.value + (value or 0) if change.is_added else change.value
            in_wait = change.signal.time >= wait.start - error
            if in_wait and _holds(awaited.relation, value, awaited.wanted):
                return change
        return last


class _Blocks:
    """Spans of the blocks of one rank. A span has the events of one role of one block."""

    def __init__(self, merge: _Merge, record: RankRecord) -> None:
        self._merge, self._record = merge, record
        self._open: dict[Any, Span] = {}
        self._ended: set[Span] = set()
        self._loops: dict[Any, float] = {}
        self._signal_times: dict[Span, float] = {}

    def spans(self) -> list[Span]:
        """Return the spans, and add their signals, transfers, flows and phases."""
        record = self._record
        for event in np.sort(record.events, order="end"):
            if 0 <= event["launch"] < len(record.launches):
                launch = record.launches[event["launch"]]
                self._add(event, launch, _table(launch.table)[event["event"]])
        for span in self._open.values():
            if span not in self._ended:
                span.end = None
        return list(self._open.values())

    def _add(self, event: np.void, launch: TracedLaunch, entry: dict[str, Any]) -> None:
        start, end = (self._merge.us(self._record, int(event[n])) for n in ("begin", "end"))
        end = max(end, start + _LEAST)
        span = self._span(event, launch, entry, start, end)
        kind, loc = entry["kind"], entry.get("loc", "")
        if kind == "end":
            self._ended.add(span)
        elif kind == "loop_begin":
            self._loops[span, entry["op"], loc] = start
        elif kind == "loop_end" and (span, entry["op"], loc) in self._loops:
            begin = self._loops.pop((span, entry["op"], loc))
            name = f"loop {entry['op']}"
            self._merge.add_phase(
                Phase(
                    span.rank, span.stream, span.block, name, span.kernel, span.launch, begin,
                    max(end, begin + _LEAST), loc,
                )
            )  # fmt: skip
        elif kind == "wait":
            self._add_wait(event, entry, span, start, end)
        elif kind == "signal":
            self._add_signal(event, entry, span, start, end)
        elif kind == "transfer":
            word = self._record.words.get(int(event["flag"]))
            peer = int(event["wanted"]) if word is None else word.owner
            self._merge.add_transfer(
                Transfer(
                    span, start, end - start, peer, entry["writes"], entry["op"],
                    entry.get("tensor", ""), loc,
                )
            )  # fmt: skip

    def _span(
        self, event: np.void, launch: TracedLaunch, entry: dict[str, Any], start: float, end: float
    ) -> Span:
        """Return the span of an event, extended to it."""
        block, role = int(event["block"]), entry["role"]
        key = int(event["launch"]), entry["kernel"], role, block
        span = self._open.get(key)
        if span is None:
            kernel = f"{entry['kernel']} ({role})" if role else entry["kernel"]
            stream = f"{launch.stream}, {role}" if role else launch.stream
            label = f"block {block}, {role}" if role else f"block {block}"
            span = self._open[key] = Span(
                self._record.rank, kernel, stream, block, label, key[0], entry.get("loc", ""),
                start, end, sm=int(event["sm"]),
            )  # fmt: skip
        span.start, span.end = min(span.start, start), max(span.end or end, end)
        return span

    def _add_wait(
        self, event: np.void, entry: dict[str, Any], span: Span, start: float, end: float
    ) -> None:
        op, loc, tensor = entry["op"], entry.get("loc", ""), entry.get("tensor", "")
        if "relation" not in entry:
            span.waits.append(Wait(start, end, op, loc=loc, text=op))
            return
        word = self._record.words.get(int(event["flag"]))
        flag = f"{tensor}{word.index if word else ''}"
        seen, value = int(event["seen"]), int(event["wanted"])
        wanted = f"{RELATION_TEXT[entry['relation']]} {value}"
        text = f"{op} {flag}: value seen {seen}, value wanted {wanted}"
        wait = Wait(start, end, op, flag, tensor, seen, wanted, loc, text)
        self._merge.add_wait(span, wait, word, entry["relation"], seen, value)

    def _add_signal(
        self, event: np.void, entry: dict[str, Any], span: Span, start: float, end: float
    ) -> None:
        word = self._record.words.get(int(event["flag"]))
        if word is None:
            return
        # Signals of one step of the clock get different times, by which a reader tells them apart.
        start = max(start, self._signal_times.get(span, start - _LEAST) + _LEAST)
        self._signal_times[span] = start
        end = max(end, start + _LEAST)
        span.end = max(span.end or end, end)
        value, change = int(event["wanted"]), entry.get("change", "")
        tensor = entry.get("tensor", "")
        flag = f"{tensor}{word.index}"
        signal = Signal(
            span, start, end - start, entry["op"], flag, tensor, None,
            value if change == "set" else None, entry.get("loc", ""), f"{change} {value}",
        )  # fmt: skip
        known = value if change in ("set", "add") else None
        self._merge.add_signal(signal, word, known, change == "add")


def _times(record: RankRecord) -> Iterator[int]:
    """Yield the times of a rank on the clock of rank 0, of which the first begins the trace."""
    offset = record.clock.offset
    if len(record.events):
        yield int(record.events["begin"].min()) - offset
    yield from (step.begin_ns - offset for step in record.steps)
    for item in (*record.launches, *record.steps):
        yield item.host_ns - record.clock.host_offset - offset


def _holds(relation: str, value: int, wanted: int) -> bool:
    return getattr(operator, "ge" if relation == "reached" else relation)(value, wanted)


@cache
def _table(table: str) -> list[dict[str, Any]]:
    return decode_events(table)
