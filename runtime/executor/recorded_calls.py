"""Recorded calls, and the cache that keeps them.

Calls with equal shapes, types, numbers and symmetric tensors enqueue the same operations on other
addresses. The operations are determined once. Each later call passes its addresses and enqueues
them.

Calls of plans, GEMMs and collectives share the cache. Its key is the signature of a call with the
stream; each thread has its own, because a call records events and waits for them at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from ..host.driver import DriverError, driver, failure
from ..host.session import Session
from ..kernel.kernel import Kernel
from ..kernel.launch_order import CallStream, begin_call, end_call
from .enqueue import Part
from .operations import DriverCall, Operation, RowsCopy, StreamMemOps

_MAX_CALLS = 512
"""Maximum number of calls that a thread keeps."""
_generation = 0
"""Number of calls of ``invalidate``."""


class CallCache(dict[Any, Any]):
    """Calls of one thread, by key. A key contains the group, which has a session, or what belongs
    to it; a call on one GPU has no group.

    A value lets a later call with the same key skip checks and decisions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generation = _generation

    def put(self, key: Hashable, value: Any) -> None:
        """Store a value, if there is a key. The oldest value makes room."""
        if key is None:
            return
        if key not in self and len(self) >= _MAX_CALLS:
            del self[next(iter(self))]
        self[key] = value


class _Thread(threading.local):
    def __init__(self) -> None:
        self.cache = CallCache()


_here = _Thread()


def recorded_calls() -> CallCache:
    """Return this thread's calls. It is empty after ``invalidate``, as when a session ends."""
    cache = _here.cache
    if cache.generation != _generation:
        cache = _here.cache = CallCache()
    return cache


def drop_calls(owner: Hashable) -> None:
    """Drop this thread's calls whose key begins with ``owner``. Those of other threads find that
    they are not valid."""
    for key in [key for key in _here.cache if key[0] is owner]:
        del _here.cache[key]


def invalidate() -> None:
    """Drop the calls of all threads, because decisions about them may have changed."""
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=invalidate)  # the process is no rank, and must be refused


def has_driver(device: torch.device) -> bool:
    """Return whether driver calls can be enqueued without Python."""
    return device.type == "cuda"


def current_stream(device: torch.device) -> Hashable:
    """Return a key of torch's current stream that says whether a CUDA graph captures it, in less
    time than ``torch.cuda.current_stream``; None without a driver."""
    if device.type != "cuda":
        return None
    stream = torch._C._cuda_getCurrentStream(device.index)
    return stream, torch._C._cuda_isCurrentStreamCapturing()


class RecordedCall:
    """Operations of calls that differ only in the addresses of their tensors.

    The calls are from one thread in one stream.

    Attributes:
        kernels: the kernels that it launches.
        native: whether it needs only the tensors' addresses.
        stream: the stream; None if the calls do not communicate.
        operations: what it enqueues.
    """

    def __init__(
        self,
        session: Session,
        stream: CallStream | None,
        operations: Sequence[Operation],
        kernels: Iterable[Kernel],
        enqueue: Callable[..., int] | None = None,
    ) -> None:
        """
        Args:
            enqueue: enqueues all operations in one call; see ``enqueue.enqueuer``.
        """
        self.kernels = list(kernels)
        self.native = enqueue is not None
        self._implicit = [(k, k.implicit) for k in self.kernels]
        self._session, self._watchdog, self.stream = session, session.watchdog, stream
        self.operations, self._enqueue = operations, enqueue
        self._actions = [] if enqueue else [o.action() for o in operations]

    @property
    def is_valid(self) -> bool:
        """True while the kernels have the memory that they had when the call was recorded."""
        for kernel, implicit in self._implicit:
            if kernel.implicit is not implicit:
                return False
        return True

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Enqueue all operations.

        Args:
            tensors: tensors of this call in the order of the plan's parameters; unused if
                ``native``.
            addresses: addresses of the tensors.

        Raises:
            DeadlockError: a wait of an earlier call timed out.
        """
        self._watchdog.raise_if_deadlocked()
        try:
            must_end = begin_call(self._session, self.stream)
            if self._enqueue is None:
                for action in self._actions:
                    action(tensors, addresses)
            elif failed := self._enqueue(*addresses):
                raise self._failure(failed, addresses)
            if must_end:
                end_call(self.stream)
        except Exception:
            self._watchdog.raise_if_deadlocked()
            raise

    def _failure(self, failed: int, addresses: Sequence[int]) -> DriverError:
        """Return the error that the native part encodes as ``failed``; see ``enqueue.enqueuer``."""
        number, status = divmod(failed, 1 << 32)
        operation = self.operations[number - 1]
        # A launch raises its error itself.
        assert isinstance(operation, (DriverCall, StreamMemOps, RowsCopy))
        arguments = operation.arguments(addresses)
        return failure(operation.name, arguments, driver().CUresult(status), operation.stream)


class JoinedCall(RecordedCall):
    """Operations of several calls, which one native call enqueues, one after the other."""

    def __init__(
        self, session: Session, stream: CallStream | None, parts: Sequence[Part],
        kernels: Iterable[Kernel], enqueue: Callable[..., int],
    ) -> None:  # fmt: skip
        """
        Args:
            kernels: the kernels of all parts.
            enqueue: see ``enqueue.enqueuer_of``.
        """
        operations = [operation for part in parts for operation in part.operations]
        super().__init__(session, stream, operations, kernels, enqueue)
        self._places = [part.places for part in parts for _ in part.operations]

    def _failure(self, failed: int, addresses: Sequence[int]) -> DriverError:
        places = self._places[(failed >> 32) - 1]
        return super()._failure(failed, [place.address(addresses) for place in places])
