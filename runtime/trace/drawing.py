"""Drawing of a trace: rectangles, lines, polygons and texts, in pixels from the top left.

The palette is that of Okabe and Ito, which is safe for color-blind readers. Shapes differ as well.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from .trace import UNITS, Span, Trace

RUNS = ("#cfd8e3", "#e9dfc7")
"""Colors of blocks, alternating by launch."""
WAITS, SIGNALS, WRITES, READS, FAULTS = "#e69f00", "#009e73", "#0072b2", "#cc79a7", "#d55e00"
INK, FAINT = "#222222", "#b8b8b8"

_LEFT, _RIGHT, _WIDTH = 124, 24, 1480
_LANE, _GAP, _MEMORY, _TOP = 30, 14, 16, 96
_MAX_DRAWN = 20_000
"""Largest number of spans, waits, marks and arrows in a drawing. Earlier ones are left out."""
_REPORT_LINES, _REPORT_COLUMNS = 16, 190


@dataclass
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = "none"
    hatch: bool = False
    tooltip: str = ""


@dataclass
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    color: str
    width: float = 1.0
    opacity: float = 1.0
    dashed: bool = False
    tooltip: str = ""


@dataclass
class Polygon:
    points: list[tuple[float, float]]
    fill: str
    tooltip: str = ""


@dataclass
class Text:
    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"
    color: str = INK
    bold: bool = False
    mono: bool = False


@dataclass
class Drawing:
    """Shapes in drawing order, with title, size and report."""

    title: str
    width: float = _WIDTH
    height: float = 0
    shapes: list[Any] = field(default_factory=list)
    report: str = ""


def draw(trace: Trace, foot: bool = True) -> Drawing:
    """Return the drawing of a trace; ``foot`` adds the first lines of the report below."""
    artist = _Artist(trace)
    if foot:
        artist.foot()
    return artist.drawing


class _Artist:
    """Draws one trace."""

    def __init__(self, trace: Trace) -> None:
        self.t = trace
        self.start = _start(trace)
        self.scale = (_WIDTH - _LEFT - _RIGHT) / max(1, trace.end - self.start)
        report = trace.fault.report if trace.fault else ""
        self.drawing = Drawing(trace.title, report=report)
        self.add = self.drawing.shapes.append
        self.lane_of: dict[Span, float] = {}
        self.top_of: dict[int, float] = {}
        self.groups: list[tuple[str, float]] = []
        """Names of the groups of lanes, with their top edges."""
        y = float(_TOP)
        for rank in range(trace.world_size):
            self.top_of[rank] = y
            y += _MEMORY
            spans = [s for s in trace.spans if s.rank == rank]
            for group in sorted({s.group for s in spans} | {"blocks"}):
                lanes = _lanes([s for s in spans if s.group == group])
                self.lane_of |= {span: y + lane * _LANE for span, lane in lanes.items()}
                self.groups.append((group, y))
                y += (max(lanes.values(), default=0) + 1) * _LANE
            y += _GAP
        self.bottom = y
        for part in (self.head, self.legend, self.ranks, self.spans, self.transfers, self.arrows,
                     self.marks, self.labels, self.fault, self.axis):  # fmt: skip
            part()

    def x(self, time: float) -> float:
        return _LEFT + (max(time, self.start) - self.start) * self.scale

    def middle(self, span: Span) -> float:
        """Return the vertical position of the marks of a span, below its name."""
        return self.lane_of[span] + 20

    def head(self) -> None:
        self.add(Text(_LEFT, 26, self.drawing.title, 17, bold=True))
        omitted = f"; the first {self.start} are left out" if self.start else ""
        time = f"time: {UNITS[self.t.unit]}"
        self.add(Text(_LEFT, 46, time + omitted, 12, color="#555555"))

    def legend(self) -> None:
        x, y = float(_LEFT), 68.0
        for name, kind in (
            ("block runs (shade: launch)", "run"), ("waits", "wait"), ("signal", "signal"),
            ("signal ends wait", "arrow"), ("write to another rank", "write"),
            ("read from another rank", "read"), ("fault", "fault"),
        ):  # fmt: skip
            self.sample(kind, x, y)
            self.add(Text(x + 34, y + 4, name))
            x += 34 + 6.7 * len(name) + 22

    def sample(self, kind: str, x: float, y: float) -> None:
        if kind == "run":
            for part, fill in enumerate(RUNS):
                self.add(Rect(x + 14 * part, y - 6, 14, 12, fill, INK))
        elif kind == "wait":
            self.add(Rect(x, y - 6, 28, 12, WAITS, INK, hatch=True))
        elif kind == "signal":
            self.add(Polygon(_triangle(x + 14, y), SIGNALS))
        elif kind == "fault":
            self.cross(x + 14, y, "")
        elif kind == "arrow":
            self.arrow(x, y, x + 28, y, SIGNALS, 1.4, "")
        else:
            self.add(Line(x, y, x + 24, y, WRITES if kind == "write" else READS, 1.2, 0.8,
                          kind == "read"))  # fmt: skip
            self.add(Polygon(_diamond(x + 26, y), WRITES if kind == "write" else READS))

    def ranks(self) -> None:
        for rank, top in self.top_of.items():
            bottom = self.top_of.get(rank + 1, self.bottom) - _GAP
            self.add(Rect(_LEFT, top, _WIDTH - _LEFT - _RIGHT, bottom - top, "#f7f7f7", FAINT))
            self.add(Line(_LEFT, top + _MEMORY / 2, _WIDTH - _RIGHT, top + _MEMORY / 2, FAINT))
            self.add(Text(10, top + 12, f"rank {rank}", 14, bold=True))
            self.add(Text(_LEFT - 6, top + _MEMORY / 2 + 4, "memory", 10, "end", "#555555"))
        for name, top in self.groups:
            self.add(Text(_LEFT - 6, top + _LANE / 2 + 4, name, 10, "end", "#555555"))

    def spans(self) -> None:
        for span in self.t.spans:
            end = self.t.until(span)
            if end < self.start:
                continue
            x, y = self.x(span.start), self.lane_of[span] + 2
            width, height = max(1.0, self.x(end) - x), _LANE - 4
            owner = f"rank {span.rank}, {span.label}, launch {span.launch}"
            self.add(Rect(x, y, width, height, RUNS[span.launch % 2], INK, tooltip=owner))
            for wait in span.waits:
                until = self.t.until(wait)
                if until >= self.start:
                    left = self.x(wait.start)
                    self.add(Rect(left, y, max(1.0, self.x(until) - left), height, WAITS, INK, True,
                                  wait.text))  # fmt: skip

    def labels(self) -> None:
        """Draw the longest name of each span that fits."""
        for span in self.t.spans:
            left = self.x(span.start)
            width = self.x(self.t.until(span)) - left
            short = span.kernel if span.block is None else str(span.block)
            for text in (f"{span.label}, launch {span.launch}", span.label, short):
                if 6.2 * len(text) + 6 <= width:
                    y, fill = self.lane_of[span] + 3, RUNS[span.launch % 2]
                    self.add(Rect(left + 1, y, 6.0 * len(text) + 4, 11, fill))
                    self.add(Text(left + 3, y + 9, text, 11))
                    break

    def transfers(self) -> None:
        for t in self.t.transfers:
            if t.time < self.start or t.span not in self.lane_of:
                continue
            color, x = WRITES if t.writes else READS, self.x(t.time)
            y = self.top_of[t.peer] + _MEMORY / 2
            self.add(Line(x, self.middle(t.span), x, y, color, 1.2, 0.55, not t.writes, t.text))
            self.add(Polygon(_diamond(x, y), color, t.text))

    def arrows(self) -> None:
        for flow in self.t.flows:
            end = self.t.until(flow.wait)
            if end >= self.start:
                signal = flow.signal
                self.arrow(
                    self.x(signal.time), self.middle(signal.span), self.x(end),
                    self.middle(flow.span), SIGNALS, 1.1, signal.text,
                )  # fmt: skip

    def arrow(self, x1, y1, x2, y2, color: str, width: float, tooltip: str) -> None:
        self.add(Line(x1, y1, x2, y2, color, width, 0.75, tooltip=tooltip))
        dx, dy = x2 - x1, y2 - y1
        length = max(1e-6, (dx * dx + dy * dy) ** 0.5)
        dx, dy = dx / length * 7, dy / length * 7
        head = [(x2, y2), (x2 - dx + dy * 0.4, y2 - dy - dx * 0.4),
                (x2 - dx - dy * 0.4, y2 - dy + dx * 0.4)]  # fmt: skip
        self.add(Polygon(head, color, tooltip))

    def marks(self) -> None:
        for signal in self.t.signals:
            if signal.time >= self.start:
                points = _triangle(self.x(signal.time), self.middle(signal.span))
                self.add(Polygon(points, SIGNALS, signal.text))

    def fault(self) -> None:
        fault = self.t.fault
        if fault is None:
            return
        ends = [
            (self.x(s.failed_at), self.middle(s)) for s in self.t.spans if s.failed_at is not None
        ]
        if not ends and fault.kind in ("deadlock", "arrival"):
            ends = [(self.x(self.t.end), self.middle(s)) for s in self.t.spans if s.end is None]
        if fault.other is not None:
            point = self.x(fault.other.time), self.middle(fault.other.span)
            for x, y in ends:
                self.add(Line(*point, x, y, FAULTS, 2, 1, True, fault.report))
            self.cross(*point, fault.other.text)
        for x, y in ends:
            self.cross(x, y, fault.report)

    def cross(self, x: float, y: float, tooltip: str) -> None:
        for side in (-1, 1):
            self.add(Line(x - 7, y - 7 * side, x + 7, y + 7 * side, "#ffffff", 6))
        for side in (-1, 1):
            self.add(Line(x - 6, y - 6 * side, x + 6, y + 6 * side, FAULTS, 3.2, tooltip=tooltip))

    def axis(self) -> None:
        y, end = self.bottom, int(self.t.end)
        step = _step(end - int(self.start))
        for time in range(-(-int(self.start) // step) * step, end + 1, step):
            x = self.x(time)
            self.add(Line(x, y - _GAP, x, y - _GAP + 5, INK))
            self.add(Text(x, y + 6, str(time), 11, "middle"))
        self.drawing.height = y + 36

    def foot(self) -> None:
        """Draw the first lines of the report."""
        lines = [
            part
            for line in self.drawing.report.splitlines()
            for part in textwrap.wrap(
                line, _REPORT_COLUMNS, subsequent_indent="    ", drop_whitespace=False
            )
        ]
        if len(lines) > _REPORT_LINES:
            lines = [*lines[: _REPORT_LINES - 1], "..."]
        for line in lines:
            self.add(Text(10, self.drawing.height - 2, line, 11.5, mono=True))
            self.drawing.height += 16


def _lanes(spans: list[Span]) -> dict[Span, int]:
    """Return the lane of each span: the topmost one that is free."""
    lanes: dict[Span, int] = {}
    ends: list[float] = []
    for span in spans:
        end = float("inf") if span.end is None else float(span.end)
        lane = next((n for n, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[span] = lane
    return lanes


def _start(trace: Trace) -> float:
    """Return the time from which at most ``_MAX_DRAWN`` elements are drawn."""
    times = sorted([
        *(s.start for s in trace.spans), *(w.start for s in trace.spans for w in s.waits),
        *(s.time for s in trace.signals), *(trace.until(f.wait) for f in trace.flows),
        *(t.time for t in trace.transfers),
    ])  # fmt: skip
    return times[-_MAX_DRAWN] if len(times) > _MAX_DRAWN else 0


def _step(span: int) -> int:
    """Return a round number that divides the span into about ten parts."""
    step = 1
    while span // step > 12:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def _triangle(x: float, y: float) -> list[tuple[float, float]]:
    return [(x, y - 5.5), (x - 5, y + 4), (x + 5, y + 4)]


def _diamond(x: float, y: float) -> list[tuple[float, float]]:
    return [(x, y - 4), (x + 4, y), (x, y + 4), (x - 4, y)]
