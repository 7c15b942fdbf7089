"""Trace of a program on several ranks: when its blocks ran and waited, and who ended each wait.

The schema does not depend on the source. The simulator fills it in steps; a recorder on GPUs fills
it in microseconds, on one clock for all ranks. ``chrome.py`` writes it as JSON, which
``page.html`` draws, and ``summary.py`` summarizes it.

JSON (Chrome's trace-event format, which Perfetto opens)::

    {
      "displayTimeUnit": "ms",
      "traceEvents": [...],
      "otherData": {"format": "tileweave-trace", "version": 1, "name", "unit", "time",
                    "world_size", "seed", "end", "fault", "clocks", "lost"}
    }

``clocks`` and ``lost`` are of GPUs: see ``Clock`` and ``Trace.lost``. ``unit`` is ``steps`` or
``us``. Viewers read each ``ts`` and ``dur`` as microseconds, so one step
is shown as one microsecond; ``time`` says what a unit is. The process (``pid``) is the rank. A
track (``tid``) is one block of a stream, or one stream, and has a ``thread_name``. Events:

======== ======== ========================================= =======================================
cat      ph       name                                      args
======== ======== ========================================= =======================================
span     X        kernel or step, with its line             kernel, launch, stream, block, label,
                                                            loc, ended, failed_at, sm
phase    X        ``loop k (gemm.py:30)``, ``enqueue gemm`` kernel, launch, stream, block, loc
wait     X        ``wait flags[1, 0] (ring.py:22)``         op, flag, tensor, seen, wanted, loc,
                                                            text, ended
signal   X        ``signal flags[1, 0] (ring.py:20)``       op, flag, tensor, before, after, loc,
                                                            text
transfer X        ``write to rank 1 (ring.py:18)``          op, tensor, peer, writes, loc, text
flow     s, f     ``signal ends wait``                      (none); ``id`` joins the two
fault    i        the kind, or ``earlier access``           text
======== ======== ========================================= =======================================

Complete events (``X``) nest: spans of a track do not overlap, and waits, signals and transfers are
within their span. A phase is a part of a span, such as a pipelined loop, or a launch on the track
``host``. A flow starts at the ``ts`` of its signal, and finishes within its wait, at
``ts + dur - LAST`` of the wait. ``ended`` is false if the schedule ended before the span or wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Unit = Literal["steps", "us"]
UNITS = {
    "steps": "simulator steps: accesses to global memory and changes of state, in the order of "
    "this schedule",
    "us": "microseconds",
}
"""Meaning of a unit of time."""


@dataclass(eq=False)
class Wait:
    """A wait of a span until ``end``; None if it does not end.

    Attributes:
        flag, tensor: the word, such as ``flags[1, 0]``, and its tensor; "" for a barrier.
        seen: value of the flag when the wait began; None if it is unknown.
        wanted: the condition, such as ``reached 1``.
        text: full description.
    """

    start: float
    end: float | None = None
    op: str = ""
    flag: str = ""
    tensor: str = ""
    seen: Any = None
    wanted: str = ""
    loc: str = ""
    text: str = ""


@dataclass(eq=False)
class Span:
    """A block of a launch, or a step that a stream executes, from its begin to its end.

    Attributes:
        kernel: name of the kernel or of the step.
        block: number of the block; None for a step of a stream.
        label: the block or the step, for people.
        end: None if the span does not end.
        failed_at: time at which it met the fault.
        sm: the SM of a GPU on which the block ran.
    """

    rank: int
    kernel: str
    stream: str
    block: int | None
    label: str
    launch: int
    loc: str
    start: float
    end: float | None = None
    waits: list[Wait] = field(default_factory=list)
    failed_at: float | None = None
    sm: int | None = None


@dataclass(eq=False)
class Signal:
    """A change of a flag by a span, or another access that a fault names."""

    span: Span
    time: float
    duration: float = 1
    op: str = ""
    flag: str = ""
    tensor: str = ""
    before: Any = None
    after: Any = None
    loc: str = ""
    text: str = ""


@dataclass(eq=False)
class Flow:
    """A signal and a wait that it ended."""

    signal: Signal
    span: Span
    wait: Wait


@dataclass(eq=False)
class Transfer:
    """An access of a span to the memory of another rank."""

    span: Span
    time: float
    duration: float
    peer: int
    writes: bool
    op: str = ""
    tensor: str = ""
    loc: str = ""
    text: str = ""


@dataclass(eq=False)
class Phase:
    """A part of a span, such as a pipelined loop, or the enqueueing of a launch by the host.

    Attributes:
        stream, block: the track; ``host`` and None for the host.
    """

    rank: int
    stream: str
    block: int | None
    name: str
    kernel: str
    launch: int
    start: float
    end: float
    loc: str = ""


@dataclass(frozen=True)
class Clock:
    """Clock of a rank's GPU and of its host, in microseconds, for a trace of GPUs.

    Attributes:
        offset: clock of this rank's GPU minus that of rank 0; the trace has subtracted it.
        error: largest error of the offset.
        host_error: largest error of the times of the host, and of the steps of streams.
    """

    rank: int
    offset: float
    error: float
    host_error: float


@dataclass(eq=False)
class Fault:
    """The fault that ended the program.

    Attributes:
        other: the earlier one of two conflicting accesses, or None.
    """

    kind: str
    report: str
    other: Signal | None = None


@dataclass(eq=False)
class Trace:
    """One run of a program on all ranks.

    Attributes:
        unit: ``steps`` of the simulator, or ``us``.
        seed: seed of a simulated schedule; None on GPUs.
        end: time at which the run ended.
        clocks: clocks of the ranks; empty for a simulation.
        lost: number of events of each rank for which its buffer had no room; empty for a
            simulation.
    """

    name: str
    world_size: int
    unit: Unit
    end: float
    spans: list[Span]
    signals: list[Signal]
    flows: list[Flow]
    transfers: list[Transfer]
    seed: int | None = None
    fault: Fault | None = None
    phases: list[Phase] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    @property
    def title(self) -> str:
        """``ring: 3 ranks, seed 0, no fault``."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        verdict = f"{self.fault.kind} fault" if self.fault else "no fault"
        lost = f", {sum(self.lost)} events lost" if any(self.lost) else ""
        return f"{self.name}: {self.world_size} ranks{seed}, {verdict}{lost}"

    def until(self, item: Span | Wait) -> float:
        """Return when a span or wait ended, at the latest with the run."""
        return self.end if item.end is None else item.end


def place(loc: str) -> str:
    """Return ``ring.py:20`` of a location with folders."""
    return Path(loc).name
