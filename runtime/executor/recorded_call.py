"""Calls made ready: what they do is known, and only where their tensors lie is open.

Calls of a plan with the same shapes, types, scalars and symmetric tensors do the same to other
memory. What that is is found once; then a call says where its tensors lie and hands all to CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ..host.driver import driver, failure
from ..host.watchdog import Watchdog
from ..kernel.kernel import Kernel
from .operations import KernelLaunch, Operation


class RecordedCall:
    """What calls do that differ only in where their tensors lie, from one thread in one stream.

    Attributes:
        kernels: those it launches.
        native: whether only the tensors' addresses matter.
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
            enqueue: enqueues the operations at once; see ``enqueue.enqueuer``.
        """
        self.kernels = list(kernels)
        self.native = enqueue is not None
        self._hidden = [(k, k.implicit) for k in self.kernels]
        self._watchdog = watchdog
        self._operations, self._enqueue = operations, enqueue
        self._actions = [] if enqueue else [o.action() for o in operations]

    @property
    def is_valid(self) -> bool:
        """Whether its kernels still have the memory that they had."""
        for kernel, implicit in self._hidden:
            if kernel.implicit is not implicit:
                return False
        return True

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Enqueue all.

        Args:
            tensors: of this call, in the order of the plan's parameters; not asked for if it is
                ``native``.
            addresses: where they lie.

        Raises:
            DeadlockError: of an earlier call that did not end.
        """
        self._watchdog.raise_if_deadlocked()
        try:
            self._do(tensors, addresses)
        except Exception:
            self._watchdog.raise_if_deadlocked()
            raise

    def _do(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        if self._enqueue is None:
            for action in self._actions:
                action(tensors, addresses)
        elif failed := self._enqueue(*addresses):
            number, status = divmod(failed, 1 << 32)
            operation = self._operations[number - 1]
            assert not isinstance(operation, KernelLaunch)  # which raises by itself
            arguments = operation.arguments(addresses)
            raise failure(operation.name, arguments, driver().CUresult(status), operation.on)
