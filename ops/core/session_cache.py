"""What was found for calls: a call like an earlier one decides nothing anew."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from ...runtime.host import session
from ...runtime.host.session import Session
from .problem import ALIGNMENT

Found = TypeVar("Found")
_MOST = 256
"""Calls that are remembered."""
_generation = 0
"""How often ``forget`` was called."""


def signature(tensor: torch.Tensor | None) -> Hashable:
    """All of a tensor that decides something: not what is in it, nor, but for whether kernels can
    read it there, where it lies."""
    if tensor is None:
        return None
    place = tensor.data_ptr() % ALIGNMENT
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place


class SessionCache(Generic[Found]):
    """What was found in the current session, until somebody forgets; the oldest make room."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Found] = {}
        self._session: Session | None = None
        self._generation = 0

    def get(self, key: Hashable) -> Found | None:
        """What was found for ``key``; None if nothing is remembered."""
        return self._found.get(key) if self._lasts() else None

    def put(self, key: Hashable, found: Found) -> None:
        """Remember it, if there is a session."""
        if not self._lasts():
            self._found.clear()
            self._session, self._generation = session.joined(), _generation
        if self._session is not None:
            if len(self._found) >= _MOST:
                del self._found[next(iter(self._found))]
            self._found[key] = found

    def _lasts(self) -> bool:
        return self._session is session.joined() and self._generation == _generation


def invalidate() -> None:
    """Whoever calls it may have changed what calls rest on."""
    global _generation
    _generation += 1
