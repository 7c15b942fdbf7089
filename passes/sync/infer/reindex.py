"""Redirect memory accesses to other buffers, which have more axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...ir.walk import op_name

Node = tirx.BufferLoad | tirx.BufferStore
Replacement = tuple[tirx.Buffer, Sequence[tirx.PrimExpr]]


def reindexed(body: tirx.Stmt, replacement_of: Callable[[Node], Replacement | None]) -> tirx.Stmt:
    """Return ``body`` with its accesses redirected to other buffers.

    Args:
        replacement_of: maps a load or store to the new buffer and the indices to insert after the
            index of the rank, or to None to keep it.
    """

    def change(node):
        if isinstance(node, (tirx.BufferLoad, tirx.BufferStore)):
            replacement = replacement_of(node)
            if replacement is None:
                return None
            buffer, inserted = replacement
            indices = [node.indices[0], *inserted, *node.indices[1:]]
            if isinstance(node, tirx.BufferLoad):
                return tirx.BufferLoad(buffer, indices)
            return tirx.BufferStore(buffer, node.value, indices)
        if op_name(node) == "tl.region" and len(node.args) - 2 < len(node.args[0].indices):
            load, mode, first, *rest = node.args
            ones = [tirx.IntImm("int32", 1)] * (len(load.indices) - len(node.args) + 2)
            return tirx.Call(node.dtype, node.op, [load, mode, first, *ones, *rest])
        return None

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.Call"]
    return ir_transform(body, None, change, kinds)
