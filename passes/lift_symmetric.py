"""Symmetric memory of a program's own becomes a parameter that the runtime supplies."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from ..builtins.symmetric import WORLD_SIZE, heap_stride, is_scratch, itemsize, packed_strides
from .hidden import Hidden, with_hidden


def lift_symmetric(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Make each ``W.alloc_symmetric`` a hidden parameter.

    Before: ``S = W.alloc_symmetric((M, N), "bfloat16")``
    After:  ``S: W.Symmetric((M, N), "bfloat16")`` behind the program's own parameters
    """
    found: dict[tirx.Var, tirx.Buffer] = {}

    def visit(node) -> None:
        if isinstance(node, tirx.AllocBuffer) and is_scratch(node.buffer):
            found[node.buffer.data] = _parameter(node.buffer)

    post_order_visit(func.body, visit)
    if not found:
        return func

    def change(node):
        new = found.get(node.buffer.data)
        if new is None:
            return None
        if isinstance(node, tirx.AllocBuffer):
            return tirx.Evaluate(0)
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(new, node.indices)
        return tirx.BufferStore(new, node.value, node.indices)

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.AllocBuffer"]
    func = func.with_body(ir_transform(func.body, None, change, kinds))
    hidden = [
        Hidden(b.name, True, tuple(int(e) for e in b.shape[1:]), str(b.dtype), scratch=True)
        for b in found.values()
    ]
    return with_hidden(func, hidden, list(found.values()))


def _parameter(buffer: tirx.Buffer) -> tirx.Buffer:
    own = list(buffer.shape[1:])
    strides = [heap_stride(itemsize(buffer.dtype)), *packed_strides(own)]
    return tirx.decl_buffer([WORLD_SIZE, *own], buffer.dtype, buffer.name, strides=strides)
