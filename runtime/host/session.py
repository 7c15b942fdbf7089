"""The runtime of this process: joined by ``init``, left by ``finalize``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...builtins.errors import TileWeaveError
from .context import Context
from .group import Group
from .heap import Heap, SymmetricTensor
from .watchdog import Watchdog

RESERVED_BYTES = 1 << 16
"""Start of the heap, kept for the runtime: the words of the process's own barriers."""
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


def enter(session: Session) -> None:
    """Make ``session`` the current one."""
    global _session
    _session = session


def leave() -> Session:
    """Return the session, which is no longer the current one."""
    global _session
    session, _session = current(), None
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
