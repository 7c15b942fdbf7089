"""Operator that the user called: warnings name it, though operators and gradients call others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""Operator that the user called in this thread, or its gradient; "" outside of a call."""


def called_as(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function: ``CALLER`` is ``name`` during its calls, unless another one is set."""

    def called(*args: Any) -> Any:
        if CALLER.get():
            return function(*args)
        token = CALLER.set(name)
        try:
            return function(*args)
        finally:
            CALLER.reset(token)

    return called


def warn_caller(message: str) -> None:
    """Warn at the line that called this package, also through torch."""
    frame, level = sys._getframe(), 1
    while frame is not None and _package_of(frame) in _SKIPPED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


_SKIPPED = (__name__.partition(".")[0], "torch")
