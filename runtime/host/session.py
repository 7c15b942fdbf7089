"""The runtime of this process: joined by ``init``, left by ``finalize``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from .context import Context
from .group import Group
from .heap import Heap, SymmetricTensor
from .watchdog import Watchdog

RESERVED_BYTES = 1 << 16
"""Bytes at the start of the heap that the runtime uses, for the words of its barriers."""
_session: Session | None = None
_inherited: Session | None = None
"""The session of the rank that has forked this process."""
_forked_from: int | None = None
"""The process id of that rank; None if this process is none that a rank has forked."""


@dataclass(frozen=True)
class Session:
    """State of the runtime between ``tw.init`` and ``tw.finalize``."""

    group: Group
    heap: Heap
    context: Context
    watchdog: Watchdog

    def close(self) -> None:
        """Release the resources. Kernels that use them must have ended on all ranks."""
        self.watchdog.close()
        self.heap.close()


def enter(session: Session) -> None:
    """Make ``session`` the current one."""
    global _session
    _session = session


def leave() -> Session:
    """Leave the current session and return it."""
    global _session
    session, _session = current(), None
    return session


def current() -> Session:
    """Return the current session.

    Raises:
        TileWeaveError: ``tw.init`` has not been called.
    """
    require_own_process()
    if _session is None:
        raise TileWeaveError("tileweave: the runtime is not up; expected tw.init() before this")
    return _session


def require_own_process() -> None:
    """Refuse a process that was forked from a rank, such as a worker of a data loader.

    It shares the sockets of the rank. A call of it would disturb those of the rank.

    Raises:
        TileWeaveError: this is such a process.
    """
    if _forked_from is not None:
        raise TileWeaveError(
            f"tileweave: process {os.getpid()} was forked from process {_forked_from}, and is no "
            "rank; expected calls from the process that torchrun started (a data loader may fork "
            "workers that do not call TileWeave)"
        )


def _leave_after_fork() -> None:
    """Leave the session in a process that a rank has forked. Its memory is that of the rank, so it
    is not released."""
    global _session, _inherited, _forked_from
    if _session is not None or dist.is_initialized():
        _session, _inherited, _forked_from = None, _session, os.getppid()


os.register_at_fork(after_in_child=_leave_after_fork)


def joined() -> Session | None:
    """Return the current session, or None before ``tw.init``."""
    return _session


def rank() -> int:
    """Return the rank of this process in the group."""
    return current().group.rank


def world_size() -> int:
    """Return the number of ranks in the group."""
    return current().group.world_size


def symmetric(shape: tuple[int, ...] | int, dtype: torch.dtype) -> SymmetricTensor:
    """Allocate a zeroed symmetric tensor. Collective, with the same shapes and types in
    the same order on all ranks.

    Args:
        shape: of one rank's copy, in elements.
        dtype: torch type with elements of 1, 2, 4, 8 or 16 bytes, not a quantized one.

    Returns:
        The tensor, with ``.all`` (world_size, *shape), ``.local`` and ``.peer(rank)``.

    Raises:
        HeapExhausted: the heap is full; the error gives the requested and the free bytes.
        TileWeaveError: the ranks' requests differ, or a shape or type is not legal.
    """
    heap = current().heap
    return heap.allocate(tuple(shape) if isinstance(shape, Sequence) else (shape,), dtype)
