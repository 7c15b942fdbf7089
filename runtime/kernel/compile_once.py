"""Compile on one rank of each node; the others load the result from the cache."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import TypeVar

from ...builtins.errors import TileWeaveError
from ..host.cache_folder import require_private_cache, root
from ..host.group import Group

T = TypeVar("T")
_NOT_WRITABLE = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)


def compile_once(group: Group, compile: Callable[[], T], label: str, is_cached: bool = False) -> T:
    """Run ``compile`` on the first rank of each node, then on the others, which find the result in
    the cache.

    Collective. A failure on one rank is an error on all ranks of the group.

    Args:
        is_cached: whether the cache has the result, equal on all ranks: all run it at once.

    Raises:
        TileWeaveError: another rank failed; the error includes its message.
    """
    programs = group.exchange("compile", label)
    if len(set(programs)) > 1:
        raise TileWeaveError(
            f"compile: the ranks compile different programs, {programs}; expected the same on "
            "every rank"
        )
    result: list[T] = []
    is_first = group.local_rank == 0
    turns = {"all": True} if is_cached else {"first": is_first, "others": not is_first}
    for turn, compiles in turns.items():
        outcome = ""
        failure: Exception | None = None
        if compiles:
            try:
                result.append(_compiled(compile, label))
            except Exception as error:
                failure, outcome = error, f"{type(error).__name__}: {error}"
        outcomes = group.exchange(f"compile: {turn}", outcome, timeout_s=3600.0)
        if failure is not None:
            raise failure
        for peer, reason in enumerate(outcomes):
            if reason:
                raise TileWeaveError(f"compile {label}: failed on rank {peer}: {reason}")
    return result[0]


def _compiled(compile: Callable[[], T], label: str) -> T:
    """Return the result of ``compile``, which may load code from the cache and write to it.

    Raises:
        TileWeaveError: the cache is full, read-only, or every user may write it.
    """
    require_private_cache()
    try:
        return compile()
    except (OSError, RuntimeError) as error:
        if _number(error) not in _NOT_WRITABLE:
            raise
        raise TileWeaveError(
            f"compile {label}: {error}; expected a cache that can be written and has room: "
            f"TILELANG_CACHE_DIR is {root()}"
        ) from error


def _number(error: Exception) -> int | None:
    """Return the number of an error of the system, which TVM turns into the text of another one."""
    if isinstance(error, OSError):
        return error.errno
    text = re.search(r"\[Errno (\d+)\]", str(error))
    return int(text[1]) if text else None
