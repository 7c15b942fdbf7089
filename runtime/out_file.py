"""Files that users want written, refused before the work that fills them."""

from __future__ import annotations

from pathlib import Path

from ..builtins.errors import TileWeaveError


def out_file(asks: str, file: str | Path) -> Path:
    """Where to write.

    Args:
        asks: who wants to, such as ``bench: --json``.

    Raises:
        TileWeaveError: it is a folder, or lies in none that exists.
    """
    path = Path(file)
    if path.is_dir() or not path.parent.is_dir():
        raise TileWeaveError(f"{asks} {file}; expected a name in a folder that exists")
    return path
