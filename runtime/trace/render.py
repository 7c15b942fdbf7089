"""Writing of traces to files: as JSON, or as a page that draws the JSON."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from ...builtins.errors import TileWeaveError
from ..host.out_file import out_file, write_out
from .chrome import to_json
from .trace import Trace

_PAGE = Path(__file__).with_name("page.html")


def writer(path: str | Path, asks: str = "timeline:") -> Callable[[Trace], None]:
    """Return a function that writes a trace to ``path`` in the format of its suffix.

    Args:
        asks: names the argument, for errors.

    Raises:
        TileWeaveError: the suffix is unknown, or the folder does not exist.
    """
    path = out_file(asks, path)
    render = {".json": to_json, ".html": html}.get(path.suffix)
    if render is None:
        raise TileWeaveError(f"{asks} {path}; expected a name that ends in .html or .json")
    return lambda trace: write_out(asks, path, render(trace))


def html(trace: Trace) -> str:
    """Return a self-contained page: a drawing with hover texts and zoom, and the fault."""
    content = to_json(trace).replace("</", "<\\/")  # a text may contain "</script>"
    page = _PAGE.read_text("utf-8").replace("{title}", escape(trace.title), 1)
    return page.replace("{trace}", content, 1)
