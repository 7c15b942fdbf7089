"""Errors a user of the language can cause, each naming the value, the place and what is legal."""

from __future__ import annotations


class TileWeaveError(Exception):
    """Base of every error TileWeave raises on purpose."""


class LanguageError(TileWeaveError, ValueError):
    """A builtin was given something it has no instruction for; raised while tracing."""


class SyncWarning(UserWarning):
    """Warning about synchronization that is legal but probably not meant, or not verified.

    Examples: a read wholly outside of its tensor, one counter for a whole axis of which each access
    touches a part, a part that is too large to verify, and refusals where ``tileweave.verify`` is
    ``warn``.
    """


def source_location() -> str:
    """`` --> file:line`` of the statement being traced, or nothing outside a TileLang program."""
    from tilelang.language.eager.builder import Builder

    builder = Builder.current()
    line = getattr(builder, "current_line", 0)
    return f"\n --> {builder.current_file}:{line}" if builder is not None and line > 0 else ""


def reject(op: str, what: str, expected: str) -> LanguageError:
    """The error for ``op``: ``<op>: <what>; expected <legal>`` and the source line when known."""
    return LanguageError(f"{op}: {what}; expected {expected}{source_location()}")
