"""Errors in programs. A message names the value, the source line and what is legal."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import is_compiling

Function = TypeVar("Function", bound=Callable)

SHOW_FRAMES = "TILEWEAVE_TRACEBACK"
"""Environment variable; with 1, errors keep the frames of TileWeave, TileLang and TVM."""

_MAX_REPR = 100
"""Largest number of characters of a value in a message."""


class TileWeaveError(Exception):
    """Base class of the errors that TileWeave raises."""


class LanguageError(TileWeaveError, ValueError):
    """A program, or an operand of a builtin, that cannot be compiled."""


class MisloweredError(LanguageError):
    """A lowered statement accesses other elements than the tile statement names."""


def shows_frames() -> bool:
    """Return whether errors keep all frames."""
    return os.environ.get(SHOW_FRAMES) == "1"


def brief_errors(function: Function) -> Function:
    """Decorate a public function: its errors show the frames of its callers and the message only.

    A ``TileWeaveError`` says itself what is wrong. The frames below ``function``, and errors that
    caused it, are those of the compiler.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        __tracebackhide__ = True  # for pytest and IPython
        try:
            return function(*args, **kwargs)
        except TileWeaveError as error:
            if is_compiling() or shows_frames():
                raise
            raise error.with_traceback(None) from None

    return call  # type: ignore[return-value]


class SyncWarning(UserWarning):
    """Warning about synchronization that is legal but probably unintended, or not verified.

    Examples: a read that is completely outside of its tensor; one counter for a whole axis although
    each access touches a part of it; a program that is too large to verify. With
    ``tileweave.verify`` set to ``warn``, errors of the inference are also given as this warning.
    """


def source_location() -> str:
    """Return `` --> file:line`` of the traced statement, or "" outside of a TileLang program."""
    from tilelang.language.eager.builder import Builder

    builder = Builder.current()
    line = getattr(builder, "current_line", 0)
    return f"\n --> {builder.current_file}:{line}" if builder is not None and line > 0 else ""


def reject(op: str, what: str, expected: str) -> LanguageError:
    """Return the error ``<op>: <what>; expected <legal>``, with the source line if it is known."""
    return LanguageError(f"{op}: {what}; expected {expected}{source_location()}")


def not_a_program(op: str, value: Any, legal: str = "a T.prim_func") -> TileWeaveError:
    """Return the error of a value that is no program."""
    if hasattr(value, "get_tir"):
        what = "a function of tilelang.jit"
        return TileWeaveError(f"{op}: {what}; expected {legal}, such as what its get_tir returns")
    return TileWeaveError(f"{op}: {short_repr(value)}; expected {legal}")


def short_repr(value: Any) -> str:
    """Return the ``repr`` of a value or, if it is long, the name of its type."""
    text = repr(value)
    return text if len(text) <= _MAX_REPR else f"an object of type {type(value).__name__}"
