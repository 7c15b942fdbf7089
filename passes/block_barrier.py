"""The block barrier as IR."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx

from .walk import op_name


def sync_threads() -> tirx.Stmt:
    """``T.sync_threads()``; TileLang makes it a partial barrier inside a specialised warp group."""
    op = tvm.ir.Op.get("tirx.tvm_storage_sync")
    return tirx.Evaluate(tirx.call_intrin("int32", op, tirx.StringImm("shared")))


def is_sync_threads(stmt: tirx.Stmt) -> bool:
    """Whether ``stmt`` is a block barrier and nothing else."""
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == "tirx.tvm_storage_sync"
