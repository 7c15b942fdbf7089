"""Folder of TileWeave in TileLang's cache: private, and locked while a process writes."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilelang import env

from ...builtins.errors import TileWeaveError

_MODE, _USUAL_MODE, _ALL = 0o700, 0o755, 0o7777
_DEPTH = 3
"""Levels of folders below the root down to those that hold TileLang's kernels."""


def root() -> Path:
    """Return the folder of the environment variable TILELANG_CACHE_DIR, or TileLang's default."""
    return Path(str(env.TILELANG_CACHE_DIR))


def cache_folder() -> Path:
    """Return the folder of TileWeave's own files. It may not exist yet."""
    return root() / "tileweave"


def writable_folder() -> Path:
    """Return the folder of TileWeave's own files; create it with mode 0700 if it does not exist.

    Raises:
        OSError: it cannot be created.
        TileWeaveError: every user may write it.
    """
    folder = cache_folder()
    for path in (folder.parent, folder):
        path.mkdir(_MODE, parents=True, exist_ok=True)
        require_private(path)
    return folder


def require_private_cache() -> None:
    """Refuse a cache of kernels in which every user may replace the code that this process loads.

    TileLang creates the cache when it is imported, with the mode that the umask leaves. Until it
    holds a kernel, this changes the usual mode 0755 to 0700.

    Raises:
        TileWeaveError: every user may write a folder of the cache.
    """
    path = root()
    require_private(path)
    if _mode(path) & _ALL == _USUAL_MODE and not any(path.glob("*/*/kernels/*")):
        with suppress(PermissionError):  # it belongs to another user
            path.chmod(_MODE)
    if _mode(path) & stat.S_IXOTH:
        for depth in range(1, _DEPTH + 1):
            for folder in path.glob("/".join("*" * depth)):
                require_private(folder)


def require_private(path: Path) -> None:
    """Refuse a folder whose content every user may choose.

    These are folders that all may write, and those of other users in a folder that all may write,
    such as /tmp.

    Raises:
        TileWeaveError: it is such a folder.
    """
    if not path.is_dir():
        return
    owner = path.stat().st_uid
    if _mode(path) & stat.S_IWOTH:
        reason = f"every user may write it (mode {_mode(path) & _ALL:04o})"
    elif owner not in (0, os.geteuid()) and _mode(path.resolve().parent) & stat.S_IWOTH:
        reason = f"it belongs to user {owner}, in a folder that every user may write"
    else:
        return
    raise TileWeaveError(
        f"cache: {path}: {reason}; expected a private TILELANG_CACHE_DIR, as code is loaded from "
        "it (chmod 0700)"
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other processes and threads."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _mode(path: Path) -> int:
    """Return the mode of a folder; 0 if another process has removed it."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0
