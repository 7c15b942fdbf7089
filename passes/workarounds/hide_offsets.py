"""Hide constant offsets in indices of shared memory, which TVM simplifies wrongly."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ..ir.hidden_zero import plus_hidden_zero
from ..ir.walk import nodes_in


def hide_offsets(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Change the index of an access to shared memory in which a constant is added to the dividend
    of a remainder.

    A tile that wgmma or the TMA reads is swizzled: its place is a sum of remainders. In a row whose
    number is constant they have constant offsets, and TVM's ``IterMapSimplify`` takes the sum for
    one number with one offset: ``(j // 32 + 1) % 2 * 32 + (j % 32 // 16 + 1) % 2 * 16 + j % 16``
    becomes ``(j + 32) % 64``.

    The pass adds a difference that is 0. nvcc removes it, but TVM cannot simplify it.

    Before: ``tile[(j // 8 + 1) % 2 * 8 + j % 8]``
    After:  ``tile[(j // 8 + 1) % 2 * 8 + j % 8 + T.bitwise_or(block, 0) - block]``
    """
    blocks = [
        stmt.node.var
        for stmt in nodes_in(func.body, tirx.AttrStmt)
        if stmt.attr_key == "thread_extent" and stmt.node.thread_tag.startswith("blockIdx")
    ]

    def change(node: tirx.BufferLoad | tirx.BufferStore):
        if not node.buffer.scope().startswith("shared") or not any(map(_has_offset, node.indices)):
            return None
        *outer, last = node.indices
        indices = [*outer, plus_hidden_zero(last, blocks[0])]
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(node.buffer, indices)
        return tirx.BufferStore(node.buffer, node.value, indices)

    if not blocks:
        return func
    return func.with_body(
        ir_transform(func.body, None, change, ["tirx.BufferLoad", "tirx.BufferStore"])
    )


def _has_offset(index: tirx.PrimExpr) -> bool:
    """Return whether a constant is added in a dividend of ``%``."""
    return any(
        isinstance(term, tirx.Add) and isinstance(term.b, tirx.IntImm) and term.b.value != 0
        for remainder in nodes_in(index, tirx.FloorMod)
        for term in nodes_in(remainder.a, tirx.Add)
    )
