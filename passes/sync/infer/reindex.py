"""Accesses to other memory, with more axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...ir.walk import op_name

Node = tirx.BufferLoad | tirx.BufferStore
Other = tuple[tirx.Buffer, Sequence[tirx.PrimExpr]]


def reindexed(body: tirx.Stmt, other_of: Callable[[Node], Other | None]) -> tirx.Stmt:
    """``body`` with accesses to other buffers.

    Args:
        other_of: what names an element -> the buffer to name instead, and what to put behind the
            index of the rank; None to leave it.
    """

    def change(node):
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            other = other_of(node)
            if other is None:
                return None
            buffer, more = other
            indices = [node.indices[0], *more, *node.indices[1:]]
            if isinstance(node, tirx.BufferLoad):
                return tirx.BufferLoad(buffer, indices)
            return tirx.BufferStore(buffer, node.value, indices)
        if op_name(node) == "tl.region" and len(node.args) - 2 < len(node.args[0].indices):
            load, mode, first, *rest = node.args
            more = [tirx.IntImm("int32", 1)] * (len(load.indices) - len(node.args) + 2)
            return tirx.Call(node.dtype, node.op, [load, mode, first, *more, *rest])
        return None

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.Call"]
    return ir_transform(body, None, change, kinds)
