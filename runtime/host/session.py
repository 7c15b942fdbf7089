"""Sessions of this process, one per group: opened by ``init``, closed by ``finalize``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError, brief_errors
from ..kernel.shared_kernels import SharedKernels
from .context import Context
from .group import Group
from .group_argument import is_alive, process_group_named
from .heap import Heap, SymmetricTensor
from .watchdog import Watchdog

RESERVED_BYTES = 1 << 16
"""Bytes at the start of the heap that the runtime uses, for the words of its barriers."""


@dataclass(frozen=True, eq=False)
class Session:
    """State of the runtime of one group between ``tw.init`` and ``tw.finalize``.

    Attributes:
        name: name of the group; "" for the default group.
        kernels: compiled kernels, which programs for several sizes share.
    """

    group: Group
    heap: Heap
    context: Context
    watchdog: Watchdog
    name: str = ""
    kernels: SharedKernels = field(default_factory=partial(SharedKernels, is_stored=True))

    @property
    def label(self) -> str:
        """Name of the group in messages."""
        return session_label(self.name)

    def close(self) -> None:
        """Release the resources. Kernels that use them must have ended on all ranks."""
        self.watchdog.close()
        self.heap.close()


_sessions: dict[str, Session] = {}
"""Open sessions by name, in the order of opening."""
_inherited: dict[str, Session] = {}
"""Sessions of the rank that has forked this process."""
only: Session | None = None
"""The open session if there is exactly one."""
_forked_from: int | None = None
"""The process id of that rank; None if this process is none that a rank has forked."""


def _open(group: Any) -> Session:
    raise NotImplementedError  # replaced by ``open_with``


def open_with(init: Callable[[Any], Session]) -> None:
    """Set the function that opens the session of a group at its first use."""
    global _open
    _open = init


def enter(session: Session) -> None:
    """Open ``session``."""
    _sessions[session.name] = session
    _changed()


def leave(session: Session) -> None:
    """Close ``session``."""
    del _sessions[session.name]
    _changed()


def _changed() -> None:
    global only
    only = next(iter(_sessions.values())) if len(_sessions) == 1 else None


def opened() -> list[Session]:
    """Return the open sessions, in the order of opening."""
    return list(_sessions.values())


def current(group: Any = None) -> Session:
    """Return the session of ``group``, by default the default group.

    A session of another group is opened if it is not open; this is collective over that group.

    Args:
        group: None, a ``ProcessGroup``, its name, or a ``DeviceMesh`` with one axis.

    Raises:
        TileWeaveError: ``tw.init`` has not been called, or ``group`` is no group of this process.
    """
    if group is None:
        session = _sessions.get("")
        if session is not None:
            return session
        require_own_process()
        raise TileWeaveError("tileweave: the runtime is not up; expected tw.init() before this")
    return _open(group)


def find_named(name: str) -> Session | None:
    """Return the open session of the group with this name; "" is the default group.

    Raises:
        TileWeaveError: the group was destroyed since its session was opened.
    """
    world = dist.group.WORLD
    if world is not None and name == world.group_name:
        name = ""
    session = _sessions.get(name)
    if session is not None and name:
        own = session.group.process_group
        _require_group(session, process_group_named(name) if _is_alive(own) else None)
    return session


def find(process_group: dist.ProcessGroup | None) -> Session | None:
    """Return the open session of a group; None for the default group.

    Raises:
        TileWeaveError: the group was destroyed since its session was opened.
    """
    name = session_name(process_group)
    session = _sessions.get(name)
    if session is not None and name:
        _require_group(session, process_group)
    return session


def session_name(process_group: dist.ProcessGroup | None) -> str:
    """Return the name of the session of a group: "" for the default group, else the group's."""
    if process_group is None or process_group is dist.group.WORLD:
        return ""
    return process_group.group_name


def session_label(name: str) -> str:
    """Return the name of a session's group in messages."""
    return f"group {name!r}" if name else "the default group"


def require_open(session: Session, user: str) -> None:
    """Refuse the use of a session that is not open.

    Args:
        user: name of the kernel or plan that uses it.

    Raises:
        TileWeaveError: it is not open, or its group was destroyed.
    """
    if _sessions.get(session.name) is not session:
        require_own_process()
        raise TileWeaveError(
            f"{user}: compiled before tw.finalize; expected tw.compile after the last tw.init"
        )
    if session.name:
        _require_group(session, session.group.process_group)


def _require_group(session: Session, process_group: dist.ProcessGroup | None) -> None:
    """Refuse a session whose group was destroyed, or replaced by ``process_group``."""
    own = session.group.process_group
    if own is not process_group or not _is_alive(own):
        raise TileWeaveError(
            f"group {session.name!r}: it was destroyed while its symmetric heap was mapped; "
            "expected tw.finalize() before torch.distributed.destroy_process_group"
        )


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


def _is_alive(group: dist.ProcessGroup | None) -> bool:
    return group is not None and is_alive(group)


def _leave_after_fork() -> None:
    """Leave the sessions in a process that a rank has forked. Their memory is that of the rank, so
    it is not released."""
    global _sessions, _inherited, _forked_from
    if _sessions or dist.is_initialized():
        _sessions, _inherited, _forked_from = {}, _sessions, os.getppid()
        _changed()


os.register_at_fork(after_in_child=_leave_after_fork)


def joined() -> Session | None:
    """Return the session of the default group, or None before ``tw.init``."""
    return _sessions.get("")


@brief_errors
def rank(group: Any = None) -> int:
    """Return the rank of this process in ``group``, by default the default group."""
    return current(group).group.rank


@brief_errors
def world_size(group: Any = None) -> int:
    """Return the number of ranks in ``group``, by default the default group."""
    return current(group).group.world_size


@brief_errors
def symmetric(
    shape: tuple[int, ...] | int, dtype: torch.dtype, group: Any = None
) -> SymmetricTensor:
    """Allocate a zeroed symmetric tensor. Collective over the group, with the same shapes and types
    in the same order on all its ranks.

    Args:
        shape: shape of one rank's copy, in elements.
        dtype: torch type with elements of 1, 2, 4, 8 or 16 bytes, not a quantized one.
        group: ranks that have a copy: None for the default group, a ``ProcessGroup``, its name, or
            a ``DeviceMesh`` with one axis.

    Returns:
        The tensor, with ``.all`` (world_size, *shape), ``.local`` and ``.peer(rank)``.

    Raises:
        HeapExhausted: the heap is full; the error gives the requested and the free bytes.
        TileWeaveError: the ranks' requests differ, or a shape or type is not legal.
    """
    heap = current(group).heap
    return heap.allocate(tuple(shape) if isinstance(shape, Sequence) else (shape,), dtype)
