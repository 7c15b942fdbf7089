"""Join and leave the group: ``tw.init`` and ``tw.finalize``."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist

from ..builtins.errors import TileWeaveError
from ..builtins.versions import unsupported_torch
from .host.context import Context
from .host.group import join
from .host.heap import Heap
from .host.memory import memory_of
from .host.native import wanted
from .host.session import RESERVED_BYTES, Session, enter, joined, leave
from .host.settings import require_equal, settings
from .host.watchdog import Watchdog
from .kernel import host_functions
from .kernel.barrier import prepare

HEAP_BYTES = (RESERVED_BYTES, 1 << 50)
"""Legal sizes of a heap, in bytes."""
TIMEOUT_S = (0, 1e9)
"""Legal time limits of a wait, in seconds; 0 means no limit. In ns it must fit into 64 bits."""


def init(
    process_group: dist.ProcessGroup | None = None, *, heap_bytes: int | None = None
) -> Session:
    """Join the group and map the symmetric heap of all ranks. Collective; calling it again does
    nothing.

    With torchrun all processes call it. Without torchrun the group is this process, and the same
    program runs on the same path. ``torch.distributed`` is initialized if it is not yet.

    Args:
        process_group: ranks that work together, by default all.
        heap_bytes: size of each rank's symmetric heap; default ``TILEWEAVE_HEAP_BYTES`` or 1 GiB.

    Raises:
        TileWeaveError: no CUDA device, an unsupported torch, a size or time limit that is not
            legal, or ranks with different versions, sizes or limits.
        DriverError: mapping a peer's memory failed.
    """
    if (session := joined()) is not None:
        return session
    if reason := unsupported_torch(torch.__version__):
        raise TileWeaveError(f"init: {reason}")
    if heap_bytes is None:
        size = _variable("TILEWEAVE_HEAP_BYTES", 1 << 30, HEAP_BYTES)
    else:
        size = _number("heap_bytes", heap_bytes, HEAP_BYTES)
    timeout_s = _variable("TILEWEAVE_TIMEOUT_S", 30, TIMEOUT_S)
    wanted()  # refuses an illegal TILEWEAVE_NATIVE
    group = join(process_group)
    require_equal(group, settings(int(size), timeout_s))
    heap = Heap(group, memory_of(group, int(size)), RESERVED_BYTES)
    context = Context(
        group.device,
        rank=group.rank,
        world_size=group.world_size,
        barrier=heap.base + group.rank * heap.stride,
        heap_stride=heap.stride,
        timeout_s=timeout_s,
    )
    group.meet("init/heap")
    session = Session(
        group, heap, context, Watchdog(group, context.record, heap.describe, timeout_s)
    )
    enter(session)
    try:
        host_functions.bind_session(session)
        prepare(session)
    except BaseException:
        _leave().close()
        raise
    return session


def finalize() -> None:
    """Leave the group: wait for this GPU and for the peers, then unmap the heap. Collective.

    ``torch.distributed`` stays initialized until the process ends; ``tw.init()`` may follow.
    """
    if joined() is None:
        return
    session = _leave()
    session.group.synchronize()
    session.group.meet("finalize")
    session.close()


def _leave() -> Session:
    """Leave the session and return it."""
    session = leave()
    host_functions.bind_session(None)
    return session


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
