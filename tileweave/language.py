"""Everything a tile program may use beyond TileLang: ``from tileweave import language as W``."""

from warnings import warn as _warn

from .builtins import language as _language
from .builtins.language import *  # noqa: F403

_RENAMED = {"own_last": "swizzle_ranks"}
"""Former names, which work until the next release."""
_RAGGED = "W.alloc_ragged, whose segments have one source each"
_REMOVED = {"alloc_packed": _RAGGED, "pad": _RAGGED}
"""Removed names, and what to use instead. They are listed until the next release."""


def __getattr__(name: str):
    """Return what a former name stands for, with a warning; refuse a removed name."""
    if name in _RENAMED:
        message = f"W.{name} is deprecated; use W.{_RENAMED[name]}"
        _warn(message, DeprecationWarning, stacklevel=2)
        return getattr(_language, _RENAMED[name])
    if name in _REMOVED:
        raise AttributeError(f"W.{name} is removed; expected {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
