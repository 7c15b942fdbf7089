"""Preparation of each launch: bind its session, and order it after launches of other groups.

A kernel that waits for its peers occupies SMs. If kernels of two groups waited side by side, one
could keep the other from starting on one GPU, and the other way round on another GPU. So launches
of different groups never overlap: where the process changes from one group to another on another
stream, the new stream waits for the last launches of the old group. This is the order of the
program, which is the same on all ranks.

    stream A   | X: all_gather_matmul |
    stream B                          | Y: all_to_all | Y: all_to_all |
    stream A                                                          | X: reduce_scatter |
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..host import session as sessions
from ..host.driver import call
from ..host.session import Session
from .host_functions import bind_session

_EAGER = 0
"""Number of the launches that no CUDA graph captures."""


@dataclass
class Run:
    """Launches of one group between launches of other groups, eager or in one capture.

    Attributes:
        group: identifies the group; None before the first launch.
        before: streams of the launches of the group before, by handle.
        streams: streams of these launches, by handle.
    """

    group: Any = None
    before: dict[Hashable, Any] = field(default_factory=dict)
    streams: dict[Hashable, Any] = field(default_factory=dict)

    def launched(self, group: Any, handle: Hashable, stream: Any) -> tuple[Run, dict]:
        """Return the run to which a launch belongs that follows this run, and the streams for
        which the launch waits, by handle."""
        run = self if self.group is group else Run(group, self.streams)
        is_first = handle not in run.streams
        waits = {h: s for h, s in run.before.items() if is_first and h != handle}
        run.streams[handle] = stream
        return run, waits


_runs: dict[int, Run] = {}
"""Latest run of eager launches, and of those in the latest capture, by the number of the capture.
Threads share it: the order of launches is that of the process."""


def prepare_launch(session: Session, stream: torch.cuda.Stream, is_captured: bool) -> None:
    """Bind ``session``, and let ``stream`` wait for the launches of the group before.

    Args:
        is_captured: whether a CUDA graph captures ``stream``.
    """
    if sessions.only is session:
        return
    bind_session(session)
    capture = _capture_of(stream.cuda_stream) if is_captured else _EAGER
    run = _runs.get(capture) or _new_capture(capture)
    _runs[capture], waits = run.launched(session, stream.cuda_stream, stream)
    for handle, earlier in waits.items():
        if _capture_of(handle) == capture:
            stream.wait_event(earlier.record_event())


def _new_capture(capture: int) -> Run:
    """Return the first run of eager launches, or of a capture. Runs of older captures are dropped:
    these have ended."""
    for older in [number for number in _runs if number != _EAGER and capture != _EAGER]:
        del _runs[older]
    return _runs.setdefault(capture, Run())


def forget_launches() -> None:
    """Drop all runs, because the sessions have ended: their launches are complete."""
    _runs.clear()


def _capture_of(stream: int) -> int:
    """Return the number of the capture of a stream; ``_EAGER`` if nothing captures it."""
    status, number, *_ = call("cuStreamGetCaptureInfo", stream)
    return int(number) if int(status) else _EAGER
