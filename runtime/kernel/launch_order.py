"""Order of the calls of this process on its GPU: each starts after the one before it has ended.

Calls that communicate share memory: symmetric tensors, counters, flags. They also wait for their
peers while they occupy SMs. If two of them ran side by side, one could overwrite what the other
reads, or keep it from starting on one GPU, and the other way round on another GPU. So they never
overlap: where the stream differs from that of the last call, the new stream waits for the old one.
This is the order of the program, which is the same on all ranks.

    stream A   | all_gather_matmul |                              | reduce_scatter |
    stream B                       | all_to_all || all_to_all |

A CUDA graph records calls now and runs them later, and the host does not see its replays. So one
event, which is always the end of the latest call, is a part of each graph:

    graph      | wait for the event | all_reduce | all_reduce | record the event |

From the first capture on, a call outside of graphs also waits for the event before and records it
after. Then calls and replays run in the order in which the host enqueues them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..host import session as sessions
from ..host.driver import DriverError, call, driver
from ..host.session import Session
from .host_functions import bind_session

_DISABLE_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""
_EXTERNAL = 1
"""CU_EVENT_WAIT_EXTERNAL: in a capture, the wait is a node that waits at each replay."""
_MAX_CAPTURES = 16
"""Largest number of captures that threads make at the same time."""
_NO_STREAM = object()
"""Stream of the last call if its end is already recorded: no stream equals it."""


@dataclass(frozen=True)
class CallStream:
    """Stream of calls.

    Attributes:
        handle: handle of the driver.
        is_captured: whether a CUDA graph captures it.
        is_external: whether torch does not own it. Its owner may destroy it after a call, and
            another stream may get its handle.
        known: the handle, if two calls in streams with this handle need no event between them.
    """

    handle: int
    is_captured: bool
    is_external: bool
    known: int | None

    @staticmethod
    def of(stream: torch.cuda.Stream, is_captured: bool) -> CallStream:
        """Return the stream of calls that torch's stream ``stream`` is."""
        # torch never destroys its own streams: their ids are odd, that of the default stream is 0.
        is_external = stream.stream_id != 0 and stream.stream_id % 2 == 0
        handle = stream.cuda_stream
        known = None if is_captured or is_external else handle
        return CallStream(handle, is_captured, is_external, known)


@dataclass
class _Capture:
    """Calls in one capture.

    Attributes:
        stream: handle of the stream of the last call.
        end: node that records the event; None before the end of the first call.
        ends: nodes that precede ``end``, by address: those with which the last call ends.
    """

    stream: int
    end: Any = None
    ends: dict[int, Any] = field(default_factory=dict)


class LaunchOrder:
    """Order of the calls on one GPU. It calls the driver only.

    Attributes:
        last: ``CallStream.known`` of the last call; ``_NO_STREAM`` if an event is its end already.
    """

    def __init__(self) -> None:
        self.last: Any = _NO_STREAM
        self._event: Any = None
        """End of the latest call, if ``last`` is no stream."""
        self._fork: Any = None
        """Joins streams of one capture. ``_event`` cannot, because no stream outside of a capture
        can wait for an event that the capture records."""
        self._is_replayed = False
        """True after the first capture: its graph may run after any call."""
        self._captures: dict[int, _Capture] = {}
        """The latest captures, by number. The host does not see their ends."""

    def begin(self, stream: CallStream) -> bool:
        """Let ``stream`` wait for the last call. Return whether ``end`` must follow the call."""
        if stream.is_captured:
            self._begin_captured(stream.handle)
            return True
        self._record_last()
        if self._event is not None:
            call("cuStreamWaitEvent", stream.handle, self._event, 0, stream=stream.handle)
        if self._is_replayed or stream.is_external:
            return True
        self.last = stream.handle
        return False

    def end(self, stream: CallStream) -> None:
        """Record the end of a call, for which the next one waits in any stream."""
        if stream.is_captured:
            self._end_captured(stream.handle)
        else:
            self._record(stream.handle)

    def _record_last(self) -> None:
        """Record the end of the last call, if it is not yet."""
        # A stream that is captured now has waited for the GPU before: torch.cuda.graph does.
        if self.last is not _NO_STREAM and _capture_of(self.last) is None:
            self._record(self.last)
        self.last = _NO_STREAM

    def _record(self, stream: int) -> None:
        if self._event is None:
            self._event = call("cuEventCreate", _DISABLE_TIMING)
        call("cuEventRecord", self._event, stream, stream=stream)

    def _begin_captured(self, stream: int) -> None:
        number, *_ = _capture_of(stream) or (0,)
        capture = self._captures.get(number)
        if capture is None:
            self._begin_capture(number, stream)
        elif capture.stream != stream:
            if self._fork is None:
                self._fork = call("cuEventCreate", _DISABLE_TIMING)
            call("cuEventRecord", self._fork, capture.stream, stream=stream)
            call("cuStreamWaitEvent", stream, self._fork, 0, stream=stream)
            capture.stream = stream

    def _begin_capture(self, number: int, stream: int) -> None:
        """Let each replay of a graph wait for the call or replay before it."""
        while len(self._captures) >= _MAX_CAPTURES:
            del self._captures[next(iter(self._captures))]
        self._record_last()
        self._is_replayed = True
        if self._event is None:
            self._event = call("cuEventCreate", _DISABLE_TIMING)
        call("cuStreamWaitEvent", stream, self._event, _EXTERNAL, stream=stream)
        self._captures[number] = _Capture(stream)

    def _end_captured(self, stream: int) -> None:
        """Let each replay record the event after this call, and after no earlier one.

        The node is no part of any stream, so no kernel waits for it.
        """
        number, graph, nodes = _capture_of(stream) or (0, None, [])
        capture = self._captures[number]
        ends = {int(node): node for node in nodes}
        if capture.end is None:
            capture.end = call("cuGraphAddEventRecordNode", graph, nodes, len(nodes), self._event)
        else:
            for key in capture.ends.keys() - ends.keys():
                with suppress(DriverError):  # refused for nodes that allocate: the edge may stay
                    _edges("Remove", graph, capture.ends[key], capture.end)
                    del capture.ends[key]
            for key in ends.keys() - capture.ends.keys():
                _edges("Add", graph, ends[key], capture.end)
        capture.ends |= ends


_order = LaunchOrder()


def begin_call(session: Session, stream: CallStream | None) -> bool:
    """Prepare a call of ``session``'s group in ``stream``: bind the session, and let the call start
    after the last one has ended. Return whether ``end_call`` must follow the call.

    All launches of kernels and plans pass here.

    Args:
        stream: None if the call does not communicate: it may overlap others.
    """
    if sessions.only is not session:
        bind_session(session)
    return stream is not None and stream.known != _order.last and _order.begin(stream)


def end_call(stream: CallStream | None) -> None:
    """Record the end of a call that is enqueued, if ``begin_call`` has asked for it."""
    assert stream is not None
    _order.end(stream)


def forget_launches() -> None:
    """Forget all calls, because the sessions have ended: their calls are complete."""
    global _order
    _order = LaunchOrder()


def _capture_of(stream: int) -> tuple[int, Any, list[Any]] | None:
    """Return the number of the capture of a stream, its graph, and the nodes after which the stream
    continues; None if nothing captures it."""
    is_version_12 = hasattr(driver(), "cuStreamGetCaptureInfo_v3")
    name = "cuStreamGetCaptureInfo_v3" if is_version_12 else "cuStreamGetCaptureInfo"
    status, number, graph, nodes, *_ = call(name, stream, stream=stream)
    return (int(number), graph, nodes) if int(status) else None


def _edges(change: str, graph: Any, node: Any, end: Any) -> None:
    """Add or remove the edge from ``node`` to ``end``."""
    name = f"cuGraph{change}Dependencies"
    name += "_v2" if hasattr(driver(), f"{name}_v2") else ""
    call(name, graph, [node], [end], None, 1)
