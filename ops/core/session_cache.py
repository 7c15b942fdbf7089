"""Session cache of call decisions, keyed by call signature."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from ...runtime.host import session
from ...runtime.host.session import Session
from .problem import ALIGNMENT

Value = TypeVar("Value")
_MOST = 256
"""Most entries of a cache."""
_generation = 0
"""Number of calls of ``invalidate``."""


def signature(tensor: torch.Tensor | None) -> Hashable:
    """Return the properties of a tensor on which a decision depends: shape, strides, type, device
    and alignment, but neither its address nor its contents."""
    if tensor is None:
        return None
    misalignment = tensor.data_ptr() % ALIGNMENT
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, misalignment


class SessionCache(Generic[Value]):
    """Cache of one session; ``invalidate`` clears it, and the oldest entries are evicted."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}
        self._session: Session | None = None
        self._generation = 0

    def get(self, key: Hashable) -> Value | None:
        """Return the value of ``key``, None if there is none."""
        return self._values.get(key) if self._is_current() else None

    def put(self, key: Hashable, value: Value) -> None:
        """Store a value, if there is a session."""
        if not self._is_current():
            self._values.clear()
            self._session, self._generation = session.joined(), _generation
        if self._session is not None:
            if len(self._values) >= _MOST:
                del self._values[next(iter(self._values))]
            self._values[key] = value

    def _is_current(self) -> bool:
        return self._session is session.joined() and self._generation == _generation


def invalidate() -> None:
    """Invalidate all cached decisions."""
    global _generation
    _generation += 1
