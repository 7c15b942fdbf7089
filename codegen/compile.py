"""Call of TileLang's compiler."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import tilelang
from tilelang import env
from tilelang.backend.target import determine_target
from tilelang.jit import JITKernel
from tvm import tirx

from .names import names_kept

_LOGGERS = ("tilelang.jit.kernel", "tilelang.cache.kernel_cache")
"""Loggers of TileLang that report each compilation, and each kernel that its cache has."""
_is_quiet: ContextVar[bool | None] = ContextVar("is_quiet", default=None)
"""Whether ``compile_by_tilelang`` drops logs; None outside of it."""


def compile_by_tilelang(func: tirx.PrimFunc, **options: Any) -> JITKernel:
    """Compile ``func``, and restore the names of its variables.

    TileLang logs its progress for ``verbose=True`` only. Its advice to use ``tilelang.jit`` instead
    of calls like this one is not for users of TileWeave.
    """
    token = _is_quiet.set(not options.get("verbose"))
    try:
        with names_kept(func):
            return tilelang.compile(func, **options)
    finally:
        _is_quiet.reset(token)


def compiles_for_group() -> bool:
    """Return whether ``compile_by_tilelang`` is running in this context."""
    return _is_quiet.get() is not None


def target() -> str:
    """Return the target for which TileLang compiles by default, as a value of its variable
    TILELANG_DEFAULT_TARGET. It is that of the current GPU."""
    return str(determine_target(env.get_default_target(), return_object=True))


def filter_logs() -> None:
    """Let TileLang's loggers drop what ``compile_by_tilelang`` is not to log. Further calls have no
    effect."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_logged)


def _is_logged(record: logging.LogRecord) -> bool:
    is_progress = record.levelno < logging.WARNING or "in memory cache" in str(record.msg)
    return not (is_progress and _is_quiet.get())
