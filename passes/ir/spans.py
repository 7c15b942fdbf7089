"""Source lines of statements. TileLang 0.1.12 records none: messages name no line there."""

from __future__ import annotations

try:
    from tilelang.ir import get_stmt_span, set_stmt_span
except ImportError:

    def get_stmt_span(stmt):
        return None

    def set_stmt_span(stmt, span) -> None:
        pass


__all__ = ["get_stmt_span", "set_stmt_span"]
