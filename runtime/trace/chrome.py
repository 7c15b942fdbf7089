"""Traces as JSON in Chrome's trace-event format. ``trace.py`` documents the events."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...builtins.errors import TileWeaveError
from .trace import (
    UNITS,
    Clock,
    Fault,
    Flow,
    Phase,
    Signal,
    Span,
    Trace,
    Transfer,
    Wait,
    place,
)

FORMAT, VERSION = "tileweave-trace", 1
_LAST = {"steps": 1.0, "us": 0.001}
"""Distance of the finish of a flow from the end of its wait: the finish must be within it."""
_SIGNAL_FIELDS = ("op", "flag", "tensor", "before", "after", "loc", "text")
_WAIT_FIELDS = ("op", "flag", "tensor", "seen", "wanted", "loc", "text")
_PHASE_FIELDS = ("kernel", "launch", "stream", "block", "loc")
_TRANSFER_FIELDS = ("op", "tensor", "peer", "writes", "loc", "text")

Event = dict[str, Any]


def to_json(trace: Trace) -> str:
    """Return the trace as JSON, one event a line."""
    events = ",\n".join(json.dumps(event, default=_number) for event in _Events(trace).all())
    fault = trace.fault
    meta = {
        "format": FORMAT, "version": VERSION, "name": trace.name, "unit": trace.unit,
        "time": UNITS[trace.unit], "world_size": trace.world_size, "seed": trace.seed,
        "end": trace.end, "fault": fault and {"kind": fault.kind, "report": fault.report},
        "clocks": [asdict(clock) for clock in trace.clocks], "lost": trace.lost,
    }  # fmt: skip
    return (
        f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(meta)},\n'
        f'"traceEvents": [\n{events}\n]}}\n'
    )


def _number(value: Any) -> Any:
    """Convert a NumPy scalar."""
    return value.item() if isinstance(value.item(), (int, float)) else str(value)


class _Events:
    """Events of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tid: dict[tuple[int, str, int | None], int] = {}
        """Track by rank, stream and block. The stream's own track is before its blocks."""
        tracks = {(s.rank, s.stream, s.block) for s in (*trace.spans, *trace.phases)}
        self._sms: dict[tuple[int, str, int | None], set[int | None]] = defaultdict(set)
        for span in trace.spans:
            self._sms[span.rank, span.stream, span.block].add(span.sm)
        for rank in range(trace.world_size):
            rank_tracks = sorted((s, -1 if b is None else b) for r, s, b in tracks if r == rank)
            for tid, (stream, block) in enumerate(rank_tracks):
                self._tid[rank, stream, None if block < 0 else block] = tid

    def all(self) -> Iterator[Event]:
        """Yield the metadata, then all events by time; those that contain others come first."""
        yield from self._names()
        timed = [
            *self._spans(), *self._phases(), *self._accesses(), *self._flows(), *self._fault()
        ]  # fmt: skip
        yield from sorted(timed, key=lambda e: (e["ts"], -e.get("dur", 0)))

    def _names(self) -> Iterator[Event]:
        for rank in range(self._trace.world_size):
            yield _meta("process_name", rank, 0, name=f"rank {rank}")
            yield _meta("process_sort_index", rank, 0, sort_index=rank)
        has_streams = len({stream for _, stream, _ in self._tid}) > 1
        for (rank, stream, block), tid in self._tid.items():
            suffix = f" of {stream}" if has_streams else ""
            block_name = f"block {block}{suffix}{self._sm(rank, stream, block)}"
            name = stream if block is None else block_name
            yield _meta("thread_name", rank, tid, name=name)
            yield _meta("thread_sort_index", rank, tid, sort_index=tid)

    def _sm(self, rank: int, stream: str, block: int) -> str:
        """Return the SM of a track, if all its spans ran on one."""
        sms = self._sms[rank, stream, block]
        return f" (SM {min(sms)})" if len(sms) == 1 and None not in sms else ""

    def _spans(self) -> Iterator[Event]:
        for span in self._trace.spans:
            args = {
                "kernel": span.kernel, "launch": span.launch, "stream": span.stream,
                "block": span.block, "label": span.label, "loc": span.loc,
                "ended": span.end is not None, "failed_at": span.failed_at, "sm": span.sm,
            }  # fmt: skip
            yield self._complete("span", _at(span.kernel, span.loc), span, span, args)
            for wait in span.waits:
                args = {name: getattr(wait, name) for name in _WAIT_FIELDS}
                args["ended"] = wait.end is not None
                name = _at(f"wait {wait.flag or wait.op}", wait.loc)
                yield self._complete("wait", name, span, wait, args)

    def _phases(self) -> Iterator[Event]:
        for phase in self._trace.phases:
            args = {name: getattr(phase, name) for name in _PHASE_FIELDS}
            yield {
                "ph": "X", "cat": "phase", "name": _at(phase.name, phase.loc),
                **self._track(phase), "ts": phase.start, "dur": phase.end - phase.start,
                "args": {"name": phase.name, **args},
            }  # fmt: skip

    def _accesses(self) -> Iterator[Event]:
        for signal in self._trace.signals:
            args = {name: getattr(signal, name) for name in _SIGNAL_FIELDS}
            name = _at(f"signal {signal.flag or signal.op}", signal.loc)
            yield self._access("signal", name, signal, args)
        for t in self._trace.transfers:
            args = {name: getattr(t, name) for name in _TRANSFER_FIELDS}
            direction = "write to" if t.writes else "read from"
            yield self._access("transfer", _at(f"{direction} rank {t.peer}", t.loc), t, args)

    def _flows(self) -> Iterator[Event]:
        last = _LAST[self._trace.unit]
        for number, flow in enumerate(self._trace.flows, 1):
            common = {"cat": "flow", "name": "signal ends wait", "id": number}
            signal, wait = flow.signal, flow.wait
            yield {"ph": "s", **common, **self._track(signal.span), "ts": signal.time}
            ts = max(wait.start, self._trace.until(wait) - last)
            yield {"ph": "f", "bp": "e", **common, **self._track(flow.span), "ts": ts}

    def _fault(self) -> Iterator[Event]:
        fault = self._trace.fault
        if fault is None:
            return
        common = {"ph": "i", "cat": "fault"}
        for span in self._trace.spans:
            if span.failed_at is not None:
                yield {**common, "name": fault.kind, **self._track(span), "ts": span.failed_at,
                       "s": "p", "args": {"text": fault.report}}  # fmt: skip
        if fault.other is not None:
            args = {name: getattr(fault.other, name) for name in _SIGNAL_FIELDS}
            yield {**common, "name": "earlier access", **self._track(fault.other.span),
                   "ts": fault.other.time, "s": "t", "args": args}  # fmt: skip

    def _track(self, span: Span | Phase) -> Event:
        return {"pid": span.rank, "tid": self._tid[span.rank, span.stream, span.block]}

    def _complete(self, cat: str, name: str, span: Span, item: Span | Wait, args: Event) -> Event:
        dur = self._trace.until(item) - item.start
        return {"ph": "X", "cat": cat, "name": name, **self._track(span), "ts": item.start,
                "dur": dur, "args": args}  # fmt: skip

    def _access(self, cat: str, name: str, item: Signal | Transfer, args: Event) -> Event:
        return {"ph": "X", "cat": cat, "name": name, **self._track(item.span), "ts": item.time,
                "dur": item.duration, "args": args}  # fmt: skip


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _at(name: str, loc: str) -> str:
    return f"{name} ({place(loc)})" if loc else name


@dataclass
class _Track:
    """Spans of one track, by start."""

    spans: list[Span] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self.starts.append(span.start)

    def at(self, time: float) -> Span:
        return self.spans[bisect_right(self.starts, time) - 1]


def from_json(text: str, source: str = "trace") -> Trace:
    """Return the trace that ``to_json`` wrote.

    Args:
        source: names the file, for errors.

    Raises:
        TileWeaveError: the text is no trace of this version.
    """
    try:
        content = json.loads(text)
        meta = content["otherData"]
        is_ours = meta["format"] == FORMAT and meta["version"] == VERSION
    except (ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise TileWeaveError(
            f"{source}; expected a trace that `tileweave simulate --timeline X.json` or tw.trace "
            "wrote"
        )
    try:
        return _read(meta, content["traceEvents"])
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise TileWeaveError(
            f"{source}: {type(error).__name__}: {error}; expected events as tileweave writes them"
        ) from None


def read(file: str | Path) -> Trace:
    """Return the trace of a JSON file.

    Raises:
        TileWeaveError: the file cannot be read, or is no trace.
    """
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise TileWeaveError(f"trace: {file}: {reason}; expected a readable file") from None
    return from_json(text, f"trace: {file}")


def _read(meta: Event, events: list[Event]) -> Trace:
    if meta["unit"] not in UNITS:
        raise ValueError(f"unit {meta['unit']!r}")
    by_cat: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_cat[event.get("cat", event["ph"])].append(event)
    tracks: dict[tuple[int, int], _Track] = defaultdict(_Track)
    for event in by_cat["span"]:
        tracks[event["pid"], event["tid"]].add(_span(event))

    def span_at(event: Event) -> Span:
        return tracks[event["pid"], event["tid"]].at(event["ts"])

    for event in by_cat["wait"]:
        args = {name: event["args"][name] for name in _WAIT_FIELDS}
        span_at(event).waits.append(Wait(event["ts"], _end(event), **args))
    signals = [_signal(event, span_at(event)) for event in by_cat["signal"]]
    fault = meta["fault"] and Fault(**meta["fault"])
    for event in by_cat["fault"]:
        if event["name"] == "earlier access":
            fault.other = _signal(event, span_at(event))
    transfers = [
        Transfer(
            span=span_at(event), time=event["ts"], duration=event["dur"],
            **{name: event["args"][name] for name in _TRANSFER_FIELDS},
        )
        for event in by_cat["transfer"]
    ]  # fmt: skip
    spans = [span for track in tracks.values() for span in track.spans]
    return Trace(
        meta["name"], meta["world_size"], meta["unit"], meta["end"],
        sorted(spans, key=lambda s: s.start), signals,
        list(_read_flows(by_cat["flow"], signals, span_at)), transfers, meta["seed"], fault,
        [_phase(event) for event in by_cat["phase"]],
        [Clock(**clock) for clock in meta["clocks"]], meta["lost"],
    )  # fmt: skip


def _read_flows(events: list[Event], signals: list[Signal], span_at: Any) -> Iterator[Flow]:
    """Yield the flows by number. A flow starts at its signal and finishes in its wait."""
    signal_at = {(signal.span, signal.time): signal for signal in signals}
    ends = {"s": {}, "f": {}}
    for event in events:
        ends[event["ph"]][event["id"]] = event
    for number, start in sorted(ends["s"].items()):
        finish = ends["f"][number]
        span, ts = span_at(finish), finish["ts"]
        open_waits = [w for w in span.waits if w.start <= ts and (w.end is None or ts < w.end)]
        wait = max(open_waits, key=lambda w: w.start)
        yield Flow(signal_at[span_at(start), start["ts"]], span, wait)


def _end(event: Event) -> float | None:
    return event["ts"] + event["dur"] if event["args"]["ended"] else None


def _span(event: Event) -> Span:
    args = event["args"]
    return Span(
        event["pid"], args["kernel"], args["stream"], args["block"], args["label"],
        args["launch"], args["loc"], event["ts"], _end(event), failed_at=args["failed_at"],
        sm=args["sm"],
    )  # fmt: skip


def _phase(event: Event) -> Phase:
    times = {"start": event["ts"], "end": event["ts"] + event["dur"]}
    return Phase(rank=event["pid"], **times, **event["args"])


def _signal(event: Event, span: Span) -> Signal:
    args = {name: event["args"][name] for name in _SIGNAL_FIELDS}
    return Signal(span, event["ts"], event.get("dur", 1), **args)
