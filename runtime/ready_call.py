"""Calls made ready: what they do is known, and only where their tensors lie is open.

Calls of a plan with the same shapes, types, scalars and symmetric tensors do the same to other
memory. What that is is found once; then a call says where its tensors lie and hands all to CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from .driver import driver, failure
from .kernel import Kernel
from .operations import KernelLaunch, Operation


class ReadyCall:
    """What calls do that differ only in where their tensors lie.

    Attributes:
        kernels: those it launches.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        kernels: Iterable[Kernel],
        native: Callable[..., int] | None = None,
    ) -> None:
        """
        Args:
            native: enqueues the operations at once; see ``native.enqueuer``.
        """
        self.kernels = list(kernels)
        self._hidden = [(k, k.hidden) for k in self.kernels]
        self._operations, self._native = operations, native
        self._actions = [] if native else [o.action() for o in operations]

    @property
    def is_valid(self) -> bool:
        """Whether its kernels still have the memory that they had."""
        for kernel, hidden in self._hidden:
            if kernel.hidden is not hidden:
                return False
        return True

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Enqueue all.

        Args:
            tensors: of this call, in the order of the plan's parameters.
            addresses: where they lie.
        """
        if self._native is None:
            for action in self._actions:
                action(tensors, addresses)
        elif failed := self._native(*addresses):
            number, status = divmod(failed, 1 << 32)
            operation = self._operations[number - 1]
            assert not isinstance(operation, KernelLaunch)  # which raises by itself
            arguments = operation.arguments(addresses)
            raise failure(operation.name, arguments, driver().CUresult(status), operation.on)
