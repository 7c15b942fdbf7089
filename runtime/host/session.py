"""The runtime of this process: joined by ``init``, left by ``finalize``."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from ...builtins.versions import unsupported_torch
from .context import Context
from .group import Group, join
from .heap import Heap, SymmetricTensor
from .memory import memory_of
from .native import wanted
from .watchdog import Watchdog

RESERVED_BYTES = 1 << 16
"""Start of the heap, kept for the runtime: the words of the process's own barriers."""
HEAP_BYTES = (RESERVED_BYTES, 1 << 50)
"""Legal sizes of a heap, in bytes."""
TIMEOUT_S = (0, 1e9)
"""Legal times a wait may take, in seconds; 0 for ever. In ns it must fit into 64 bits."""

_session: Session | None = None


@dataclass(frozen=True)
class Session:
    """Everything the runtime holds while it is up."""

    group: Group
    heap: Heap
    context: Context
    watchdog: Watchdog

    def close(self) -> None:
        """Give up what it holds. Kernels that use it must have ended on every rank."""
        self.watchdog.close()
        self.heap.close()


def init(
    process_group: dist.ProcessGroup | None = None, *, heap_bytes: int | None = None
) -> Session:
    """Join the group and map everyone's symmetric heap. Collective; calling it again does nothing.

    Under torchrun every process calls it; without torchrun the group is this process alone, and the
    same program runs on the same path. ``torch.distributed`` is initialised if it is not yet.

    Args:
        process_group: ranks that work together, by default all.
        heap_bytes: size of each rank's symmetric heap; default ``TILEWEAVE_HEAP_BYTES`` or 1 GiB.

    Raises:
        TileWeaveError: no CUDA device, a torch that is not supported, or a size or a time that is
            not legal.
        DriverError: mapping a peer's memory failed.
    """
    global _session
    if _session is not None:
        return _session
    if why := unsupported_torch(torch.__version__):
        raise TileWeaveError(f"init: {why}")
    if heap_bytes is None:
        size = _variable("TILEWEAVE_HEAP_BYTES", 1 << 30, HEAP_BYTES)
    else:
        size = _number("heap_bytes", heap_bytes, HEAP_BYTES)
    timeout_s = _variable("TILEWEAVE_TIMEOUT_S", 30, TIMEOUT_S)
    wanted()  # judges its variable
    group = join(process_group)
    agreed = group.exchange("init", f"heap_bytes={int(size)}")
    if len(set(agreed)) > 1:
        raise TileWeaveError(
            f"init: the ranks differ in {agreed}; expected the same TILEWEAVE_HEAP_BYTES everywhere"
        )
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
    _session = Session(
        group, heap, context, Watchdog(group, context.record, heap.describe, timeout_s)
    )
    from ..kernel.barrier import prepare  # compiles for the session that is now up
    from ..kernel.host_functions import say

    try:
        say(_session)
        prepare(_session)
    except BaseException:
        _leave().close()
        raise
    return _session


def finalize() -> None:
    """Leave the group: wait for this GPU and for the peers, then unmap the heap. Collective.

    ``torch.distributed`` stays initialised until the process ends; ``tw.init()`` may follow.
    """
    if _session is None:
        return
    session = _leave()
    session.group.synchronize()
    session.group.meet("finalize")
    session.close()


def _leave() -> Session:
    """The session, which is no longer the current one."""
    global _session
    from ..kernel.host_functions import say

    session, _session = current(), None
    say(None)
    return session


def current() -> Session:
    """The session, or an error that says to call ``tw.init()``."""
    if _session is None:
        raise TileWeaveError("tileweave: the runtime is not up; expected tw.init() before this")
    return _session


def joined() -> Session | None:
    """The session, if the runtime is up."""
    return _session


def rank() -> int:
    """Rank of this process in the group."""
    return current().group.rank


def world_size() -> int:
    """Number of ranks in the group."""
    return current().group.world_size


def symmetric(shape: tuple[int, ...] | int, dtype: torch.dtype) -> SymmetricTensor:
    """Allocate a zeroed symmetric tensor. Collective: every rank, same shape and type, same order.

    Args:
        shape: of one rank's copy, in elements.
        dtype: torch type with elements of 1, 2, 4, 8 or 16 bytes, not a quantized one.

    Returns:
        The tensor, with ``.all`` (world_size, *shape), ``.local`` and ``.peer(rank)``.

    Raises:
        HeapExhausted: no room; names the bytes asked for and free.
        TileWeaveError: ranks ask for different things, or a shape or type is not legal.
    """
    heap = current().heap
    return heap.allocate(tuple(shape) if isinstance(shape, Sequence) else (shape,), dtype)


def _variable(name: str, default: float, legal: tuple[float, float]) -> float:
    return _number(name, os.environ.get(name, default), legal)


def _number(name: str, given: object, legal: tuple[float, float]) -> float:
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if not legal[0] <= value <= legal[1]:
        raise TileWeaveError(
            f"init: {name}={given!r}; expected a number from {legal[0]:g} to {legal[1]:g}"
        )
    return value
