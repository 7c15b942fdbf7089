"""Symmetric memory that a program allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.symmetric import is_scratch
from .walk import nodes_in, with_span_of


def with_buffers(
    body: tirx.Stmt, buffers: Mapping[tirx.Var, tirx.Buffer],
    replace: Callable[[tirx.AllocBuffer], tirx.Stmt],
) -> tirx.Stmt:  # fmt: skip
    """Replace buffers in ``body``.

    Args:
        buffers: the new buffers, by the data pointers of the old ones.
        replace: returns the statement that replaces an allocation.
    """

    def change(node):
        new = buffers.get(node.buffer.data)
        if new is None:
            return None
        if isinstance(node, tirx.AllocBuffer):
            return replace(node)
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(new, node.indices, node.predicate, node.span)
        store = tirx.BufferStore(new, node.value, node.indices, node.predicate)
        return with_span_of(node, store)

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.AllocBuffer"]
    return ir_transform(body, None, change, kinds)


def scratch_of(body: tirx.Stmt) -> list[tirx.AllocBuffer]:
    """Return the allocations of ``W.alloc_symmetric`` in ``body``."""
    return [a for a in nodes_in(body, tirx.AllocBuffer) if is_scratch(a.buffer)]
