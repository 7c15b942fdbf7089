"""Files that users want written, refused before the work that fills them."""

from __future__ import annotations

from pathlib import Path

from ...builtins.errors import TileWeaveError


def out_file(asks: str, file: str | Path) -> Path:
    """Where to write.

    Args:
        asks: who wants to, such as ``bench: --json``.

    Raises:
        TileWeaveError: it is a folder, or lies in none that exists; or its name is too long.
    """
    path = Path(file)
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise _failed(asks, file, error) from None
    if is_folder or not path.parent.is_dir():
        raise TileWeaveError(f"{asks} {file}; expected a name in a folder that exists")
    return path


def write_out(asks: str, file: str | Path, content: str | bytes) -> None:
    """Write it; text as UTF-8.

    Raises:
        TileWeaveError: the system refuses.
    """
    try:
        Path(file).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _failed(asks, file, error) from None


def _failed(asks: str, file: str | Path, error: OSError) -> TileWeaveError:
    return TileWeaveError(f"{asks} {file}: {error.strerror}; expected a file that can be written")
