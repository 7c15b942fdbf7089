"""Summary of a trace: shares of time by rank and kernel, and the critical path across ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .trace import Flow, Signal, Span, Trace, Wait, place

_MAX_HOPS = 6
"""Number of waits of the critical path that the text names."""


@dataclass
class Share:
    """Time of all spans of one kernel on one rank.

    Attributes:
        total: sum of the durations of the spans.
        waiting: time in waits.
        publishing: time in signals and in writes to other ranks, outside of waits.
        by_wait: time by tensor (or barrier) and line.
    """

    rank: int
    kernel: str
    spans: int = 0
    total: float = 0
    waiting: float = 0
    publishing: float = 0
    by_wait: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def computing(self) -> float:
        """Time that is neither waiting nor publishing."""
        return self.total - self.waiting - self.publishing

    def of(self, time: float) -> float:
        """Return ``time`` as a share of the total."""
        return time / self.total if self.total else 0.0


@dataclass
class Hop:
    """A wait of the critical path.

    Attributes:
        signal: what ended the wait; None for a wait that does not end.
        worked: time for which the signalling rank did not wait before the signal.
        since: wait that ended before; None: since the rank began.
    """

    span: Span
    wait: Wait
    signal: Signal | None
    worked: float = 0
    since: Wait | None = None


@dataclass
class Summary:
    """Shares of each rank and kernel, and the critical path from the end to the begin.

    Attributes:
        last: the span that ended last, or that never ends.
    """

    trace: Trace
    shares: list[Share]
    last: Span | None
    path: list[Hop]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def as_json(self) -> dict[str, Any]:
        """Return the summary as numbers and texts."""
        trace = self.trace
        fault = trace.fault and {"kind": trace.fault.kind, "report": trace.fault.report}
        return {
            "name": trace.name, "unit": trace.unit, "end": trace.end, "seed": trace.seed,
            "fault": fault, "lost": trace.lost, "clocks": [asdict(c) for c in trace.clocks],
            "shares": [_share_json(s) for s in self.shares],
            "critical_path": [_hop_json(hop) for hop in self.path],
        }  # fmt: skip


def summarize(trace: Trace) -> Summary:
    """Return the summary of a trace."""
    last, path = _critical_path(trace)
    return Summary(trace, _shares(trace), last, path)


def _shares(trace: Trace) -> list[Share]:
    published: dict[Span, list[tuple[float, float]]] = {}
    for access in [*trace.signals, *(t for t in trace.transfers if t.writes)]:
        interval = access.time, access.time + access.duration
        published.setdefault(access.span, []).append(interval)
    shares: dict[tuple[int, str], Share] = {}
    for span in trace.spans:
        share = shares.setdefault((span.rank, span.kernel), Share(span.rank, span.kernel))
        waits = [(w.start, trace.until(w)) for w in span.waits]
        waiting = _covered(waits)
        share.spans += 1
        share.total += trace.until(span) - span.start
        share.waiting += waiting
        share.publishing += _covered([*waits, *published.get(span, ())]) - waiting
        for wait, (start, end) in zip(span.waits, waits, strict=True):
            key = wait.tensor or wait.op, wait.loc
            share.by_wait[key] = share.by_wait.get(key, 0) + end - start
    return [shares[key] for key in sorted(shares)]


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


def _critical_path(trace: Trace) -> tuple[Span | None, list[Hop]]:
    """Return the span that ended last and the waits that led to it, the last wait first.

    A wait is on the path if the last signal that ended it came after the wait began. The path
    continues in the span that signalled. A span without such a wait continues in the span of its
    rank that ended last before it began.
    """
    if not trace.spans:
        return None, []
    enders = _enders(trace)
    stuck = [s for s in trace.spans if s.end is None and s.waits and s.waits[-1].end is None]
    span = max(stuck or trace.spans, key=trace.until)
    last, time, path = span, trace.until(span), []
    if stuck:
        time = span.waits[-1].start
        path.append(Hop(span, span.waits[-1], None))
    while True:
        span, wait = _previous_wait(trace, enders, span, time)
        if path:
            path[-1].worked = time - (trace.until(wait) if wait else span.start)
            path[-1].since = wait
        if wait is None:
            return last, path
        signal = enders.pop(wait).signal
        path.append(Hop(span, wait, signal))
        span, time = signal.span, min(signal.time, trace.until(wait))


def _enders(trace: Trace) -> dict[Wait, Flow]:
    """Return the last flow into each wait, if it came after the wait began."""
    enders: dict[Wait, Flow] = {}
    for flow in trace.flows:
        other = enders.get(flow.wait)
        since = flow.wait.start if other is None else other.signal.time
        if flow.signal.time > since:
            enders[flow.wait] = flow
    return enders


def _previous_wait(
    trace: Trace, enders: dict[Wait, Flow], span: Span, time: float
) -> tuple[Span, Wait | None]:
    """Return the last wait that ended before ``time`` in a span, or in spans of its rank before it.
    If no wait held this rank up, return its first span and None."""
    while True:
        waits = [w for w in span.waits if w in enders and trace.until(w) <= time]
        if waits:
            return span, max(waits, key=trace.until)
        time = span.start
        earlier = [
            s for s in trace.spans
            if s.rank == span.rank and trace.until(s) <= time and s.start < time
        ]  # fmt: skip
        if not earlier:
            return span, None
        span = max(earlier, key=trace.until)


def _lines(summary: Summary) -> Iterator[str]:
    trace = summary.trace
    yield f"{trace.title}, {_time(trace.end, trace)}"
    for rank, lost in enumerate(trace.lost):
        if lost:
            yield f"rank {rank}: {lost} events lost, for which its buffer had no room"
    width = max([len("kernel"), *(len(s.kernel) for s in summary.shares)])
    yield f"rank  {'kernel':{width}}  spans  computing  waiting  publishing"
    for share in summary.shares:
        computing, waiting, publishing = (
            f"{share.of(t):.1%}" for t in (share.computing, share.waiting, share.publishing)
        )
        yield (
            f"{share.rank:4}  {share.kernel:{width}}  {share.spans:5}  {computing:>9}  "
            f"{waiting:>7}  {publishing:>10}"
        )
        for (name, loc), time in sorted(share.by_wait.items(), key=lambda item: -item[1]):
            yield f"        {share.of(time):6.1%} waiting for {name}{_line(loc)}"
    yield from _path_lines(summary)


def _path_lines(summary: Summary) -> Iterator[str]:
    trace, last = summary.trace, summary.last
    if last is None:
        return
    yield "critical path, from its end:"
    if last.end is not None:
        yield f"  {_who(last)} in launch {last.launch} ended last, at {_time(last.end, trace)}"
    for hop in summary.path[:_MAX_HOPS]:
        yield f"  {_hop_text(hop, trace)}"
    num_omitted = len(summary.path) - _MAX_HOPS
    if num_omitted > 0:
        yield f"  and {num_omitted} earlier {'wait' if num_omitted == 1 else 'waits'}"
    if not summary.path:
        yield "  it did not wait for another rank or block"


def _hop_text(hop: Hop, trace: Trace) -> str:
    wait, signal = hop.wait, hop.signal
    target = f"for {wait.flag or wait.op}{_line(wait.loc)}"
    if signal is None:
        seen = "" if wait.seen is None else f": value seen {wait.seen}, value wanted {wait.wanted}"
        return f"{_who(hop.span)} waits {target} without end{seen}"
    verb = "signalled" if wait.flag else "reached last"
    after = f"{_time(hop.worked, trace)} after rank {signal.span.rank}"
    since = "began" if hop.since is None else f"had waited for {_what(hop.since)}"
    waited = _time(trace.until(wait) - wait.start, trace)
    return (
        f"{_who(hop.span)} waited {waited} {target}, which {_who(signal.span)} "
        f"{verb}{_line(signal.loc)}, {after} {since}"
    )


def _what(wait: Wait) -> str:
    return wait.flag or wait.op


def _who(span: Span) -> str:
    return f"rank {span.rank}, {span.label}"


def _line(loc: str) -> str:
    return f" at {place(loc)}" if loc else ""


def _time(time: float, trace: Trace) -> str:
    return f"{time:.10g} {trace.unit}"


def _share_json(share: Share) -> dict[str, Any]:
    return {
        "rank": share.rank, "kernel": share.kernel, "spans": share.spans, "total": share.total,
        "computing": share.computing, "waiting": share.waiting, "publishing": share.publishing,
        "waits": [
            {"for": name, "loc": loc, "time": time} for (name, loc), time in share.by_wait.items()
        ],
    }  # fmt: skip


def _hop_json(hop: Hop) -> dict[str, Any]:
    signal = hop.signal
    signalled_by = signal and {
        "rank": signal.span.rank, "label": signal.span.label, "loc": signal.loc,
        "time": signal.time, "worked": hop.worked,
    }  # fmt: skip
    return {
        "rank": hop.span.rank, "label": hop.span.label, "for": _what(hop.wait),
        "loc": hop.wait.loc, "start": hop.wait.start, "end": hop.wait.end,
        "signalled": signalled_by,
    }  # fmt: skip
