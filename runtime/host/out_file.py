"""Output files of commands, checked before the work that fills them."""

from __future__ import annotations

from pathlib import Path

from ...builtins.errors import TileWeaveError


def out_file(option: str, file: str | Path) -> Path:
    """Return the path of a file to write.

    Args:
        option: that names the file, such as ``bench: --json``; for errors.

    Raises:
        TileWeaveError: the file is a folder, its folder does not exist, or its name is too long.
    """
    path = Path(file)
    try:
        is_folder = path.is_dir()
    except OSError as error:
        raise _failed(option, file, error) from None
    if is_folder or not path.parent.is_dir():
        raise TileWeaveError(f"{option} {file}; expected a name in a folder that exists")
    return path


def write_out(option: str, file: str | Path, content: str | bytes) -> None:
    """Write ``content`` to a file; text as UTF-8.

    Raises:
        TileWeaveError: the system cannot write the file.
    """
    try:
        Path(file).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _failed(option, file, error) from None


def _failed(option: str, file: str | Path, error: OSError) -> TileWeaveError:
    return TileWeaveError(f"{option} {file}: {error.strerror}; expected a file that can be written")
