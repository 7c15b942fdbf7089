"""Block barriers in the IR."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from .walk import op_name

SYNC_THREADS = "tirx.tvm_storage_sync"
"""Barrier of all threads of the block or, with a number, of some."""


def sync_threads(scope: str = "shared") -> tirx.Stmt:
    """Return ``T.sync_threads()``.

    TileLang makes it a partial barrier inside a specialized warp group.

    Args:
        scope: ``shared.dyn`` for a barrier that the program does not contain: it may be removed.
    """
    op = tvm.ir.Op.get(SYNC_THREADS)
    return tirx.Evaluate(tirx.call_intrin("int32", op, tirx.StringImm(scope)))


def is_barrier(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is a barrier of the block, or of a part of it."""
    if not isinstance(stmt, tirx.Evaluate) or op_name(stmt.value) != SYNC_THREADS:
        return False
    return stmt.value.args[0].value.startswith("shared")


def is_sync_threads(stmt: tirx.Stmt) -> bool:
    """Return whether ``stmt`` is a barrier of the whole block."""
    return is_barrier(stmt) and len(stmt.value.args) == 1
