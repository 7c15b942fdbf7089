"""What was decided for calls: a call like an earlier one decides nothing anew."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..runtime import session
from ..runtime.session import Session

_MOST = 256
"""Decisions that are remembered."""
_session: Session | None = None
_decisions: dict[Hashable, Any] = {}


def signature(tensor: torch.Tensor | None) -> Hashable:
    """All of a tensor that decides something: not what is in it, nor where it lies."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def recalled(key: Hashable) -> Any:
    """What was decided for ``key`` in the current session; None if nothing is remembered."""
    return _decisions.get(key) if session.joined() is _session else None


def remember(key: Hashable, decision: Any) -> None:
    """Recall it until the session ends or somebody forgets; the oldest ones make room."""
    global _session
    if session.joined() is not _session:
        forget()
        _session = session.joined()
    if _session is not None:
        if len(_decisions) >= _MOST:
            del _decisions[next(iter(_decisions))]
        _decisions[key] = decision


def forget() -> None:
    """Whoever calls it may have changed what decisions rest on."""
    _decisions.clear()
