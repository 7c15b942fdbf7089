"""Source lines of a program."""

from __future__ import annotations

from tilelang import tvm  # noqa: F401  (makes the bundled tvm importable)
from tvm import tirx

from ..passes.ir.leaves import leaves_of


def source_of(func: tirx.PrimFunc) -> tuple[str, int, int] | None:
    """Return (file, first line, last line) of a program, or None if TileLang recorded no span."""
    span = func.span
    if span is None or span.source_name is None:
        return None
    file, first = str(span.source_name.name), int(span.line)
    places = [leaf.loc for leaf in leaves_of(func.body)]
    return file, first, max([first, *(line for path, line in places if path == file)])
