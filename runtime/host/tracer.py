"""Recorder of a trace on the host: the launches and the steps of plans while ``tw.trace`` runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .session import Session


@dataclass(frozen=True)
class TracedLaunch:
    """A launch of a traced kernel; its index is the number that its events have.

    Attributes:
        table: events of the kernel; see ``passes.device.record_events.decode_events``.
        host_ns: time at which the host enqueued it, of ``time.monotonic_ns``.
    """

    table: str
    stream: str
    host_ns: int


@dataclass(frozen=True)
class TracedStep:
    """A copy, a write or a wait of a plan, between two events of its stream.

    Attributes:
        address: address of the word that is written or awaited, or of the remote end of a copy.
        value: value that is written or awaited; None if the host does not know it.
        nbytes: bytes of a copy.
        begin, end: events of the stream before and after it.
    """

    kind: Literal["copy", "write", "wait"]
    op: str
    loc: str
    stream: str
    tensor: str
    address: int
    value: int | None
    nbytes: int
    begin: Any
    end: Any
    host_ns: int


class Tracer:
    """Records of the host, to which all threads of the process append.

    Attributes:
        session: session of the group whose launches it records.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.launches: list[TracedLaunch] = []
        self.steps: list[TracedStep] = []
        self._streams: dict[int, str] = {}

    def begin_launch(self, table: str) -> int:
        """Record a launch in torch's current stream, and return its number."""
        stream = self.stream(torch.cuda.current_stream().cuda_stream)
        self.launches.append(TracedLaunch(table, stream, time.monotonic_ns()))
        return len(self.launches) - 1

    def stream(self, handle: int) -> str:
        """Return a name for a stream: ``stream 0`` for the first one that is used."""
        return self._streams.setdefault(handle, f"stream {len(self._streams)}")


_active: Tracer | None = None


def active() -> Tracer | None:
    """Return the tracer of the trace that is being recorded, or None."""
    return _active


def tracer_of(session: Session) -> Tracer | None:
    """Return the tracer that records the launches of ``session``, or None."""
    return _active if _active is not None and _active.session is session else None


def activate(tracer: Tracer | None) -> None:
    """Record with ``tracer`` from now on; None ends the recording."""
    global _active
    _active = tracer
