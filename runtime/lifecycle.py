"""Join and leave the group: ``tw.init`` and ``tw.finalize``."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from ..builtins.errors import TileWeaveError, brief_errors
from ..builtins.versions import unsupported_torch
from .executor.recorded_calls import invalidate
from .host.context import Context
from .host.group import join
from .host.group_argument import process_group_of
from .host.heap import Heap
from .host.memory import memory_of
from .host.native import build_ahead
from .host.session import (
    RESERVED_BYTES,
    Session,
    enter,
    find,
    leave,
    open_with,
    opened,
    session_label,
    session_name,
)
from .host.settings import require_equal, settings
from .host.watchdog import Watchdog
from .kernel import host_functions
from .kernel.barrier import prepare
from .kernel.kernel import capturing
from .kernel.launch_order import forget_launches

HEAP_BYTES = (RESERVED_BYTES, 1 << 50)
"""Legal sizes of a heap, in bytes."""
TIMEOUT_S = (0, 1e9)
"""Legal time limits of a wait, in seconds; 0 means no limit. In ns it must fit into 64 bits."""


@brief_errors
def init(group: Any = None, *, heap_bytes: int | None = None) -> Session:
    """Join a group and map the symmetric heap of its ranks. Collective over the group; calling it
    again does nothing.

    With torchrun all processes call ``tw.init()``. Without torchrun the group is this process, and
    the same program runs on the same path. ``torch.distributed`` is initialized if it is not yet.

    Each group has a heap of its own. The first use of another group than the default joins it;
    ``tw.init(group)`` does so ahead, and may set the size of its heap.

    Args:
        group: ranks that work together: None for all, a ``ProcessGroup``, its name, or a
            ``DeviceMesh`` with one axis.
        heap_bytes: size of each rank's symmetric heap; default ``TILEWEAVE_HEAP_BYTES`` or 1 GiB.

    Raises:
        TileWeaveError: no CUDA device, an unsupported torch, a group without this process, a size
            or time limit that is not legal, or ranks with different versions, sizes or limits.
        DriverError: mapping a peer's memory failed.
    """
    process_group = process_group_of(group)
    if (session := find(process_group)) is not None:
        return session
    if capturing():
        raise TileWeaveError(
            f"init: {session_label(session_name(process_group))} is not joined yet; expected "
            "tw.init of it, or a call, before a CUDA graph is captured"
        )
    if reason := unsupported_torch(torch.__version__):
        raise TileWeaveError(f"init: {reason}")
    if heap_bytes is None:
        size = _variable("TILEWEAVE_HEAP_BYTES", 1 << 30, HEAP_BYTES)
    else:
        size = _number("heap_bytes", heap_bytes, HEAP_BYTES)
    timeout_s = _variable("TILEWEAVE_TIMEOUT_S", 30, TIMEOUT_S)
    build_ahead()
    ranks = join(process_group)
    require_equal(ranks, settings(int(size), timeout_s))
    heap = Heap(ranks, memory_of(ranks, int(size)), RESERVED_BYTES)
    context = Context(
        ranks.device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        barrier=heap.base + ranks.rank * heap.stride,
        heap_stride=heap.stride,
        timeout_s=timeout_s,
    )
    ranks.meet("init/heap")
    watchdog = Watchdog(ranks, context.record, heap.describe, timeout_s)
    session = Session(ranks, heap, context, watchdog, session_name(process_group))
    enter(session)
    try:
        prepare(session)
        host_functions.open_session(session)
    except BaseException:
        _leave(session)
        session.close()
        raise
    return session


open_with(init)


@brief_errors
def finalize() -> None:
    """Leave all groups: wait for this GPU and for the peers, then unmap the heaps. Collective.

    ``torch.distributed`` stays initialized until the process ends; ``tw.init()`` may follow.
    """
    sessions = opened()
    for session in sessions:
        _leave(session)
        session.group.synchronize()
    # All groups are told before any is waited for, so ranks may have joined them in any order.
    for session in sessions:
        session.group.publish("finalize", "")
    for session in sessions:
        session.group.collect("finalize", "")
    for session in sessions:
        session.close()


def _leave(session: Session) -> None:
    """Leave a session."""
    leave(session)
    host_functions.close_session(session)
    if not opened():
        forget_launches()
    invalidate()


def _variable(name: str, default: float, legal: tuple[float, float]) -> float:
    return _number(name, os.environ.get(name, default), legal)


def _number(name: str, setting: object, legal: tuple[float, float]) -> float:
    try:
        value = float(str(setting))
    except ValueError:
        value = math.nan
    if not legal[0] <= value <= legal[1]:
        raise TileWeaveError(
            f"init: {name}={setting!r}; expected a number from {legal[0]:g} to {legal[1]:g}"
        )
    return value
