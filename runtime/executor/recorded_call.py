"""Recorded calls: all operations are known, and only the addresses of the tensors vary.

Calls of a plan with equal shapes, types, scalars and symmetric tensors enqueue the same operations
on other addresses. The operations are determined once; each call then passes its addresses and
enqueues them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..host.driver import driver, failure
from ..host.watchdog import Watchdog
from ..kernel.kernel import Kernel
from .operations import KernelLaunch, Operation


class RecordedCall:
    """Operations of calls that differ only in the addresses of their tensors.

    The calls are from one thread in one stream.

    Attributes:
        kernels: the kernels that it launches.
        native: whether it needs only the tensors' addresses.
    """

    def __init__(
        self,
        watchdog: Watchdog,
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
        self._watchdog = watchdog
        self._operations, self._enqueue = operations, enqueue
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
            tensors: of this call, in the order of the plan's parameters; unused if ``native``.
            addresses: of the tensors.

        Raises:
            DeadlockError: a wait of an earlier call timed out.
        """
        self._watchdog.raise_if_deadlocked()
        try:
            self._enqueue_all(tensors, addresses)
        except Exception:
            self._watchdog.raise_if_deadlocked()
            raise

    def _enqueue_all(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        if self._enqueue is None:
            for action in self._actions:
                action(tensors, addresses)
        elif failed := self._enqueue(*addresses):
            number, status = divmod(failed, 1 << 32)
            operation = self._operations[number - 1]
            assert not isinstance(operation, KernelLaunch)  # a launch raises
            arguments = operation.arguments(addresses)
            raise failure(operation.name, arguments, driver().CUresult(status), operation.on)
