"""Make a program's own symmetric memory a parameter that the runtime supplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilelang import tvm
from tilelang.ir import get_stmt_span, set_stmt_span
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, post_order_visit

from ...builtins.errors import LanguageError
from ...builtins.symmetric import WORLD_SIZE, heap_stride, is_scratch, itemsize, packed_strides
from ..ir.implicit import Implicit, with_implicit
from ..ir.walk import format_expr, location


def lift_symmetric(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Make each ``W.alloc_symmetric`` an implicit parameter.

    Raises:
        LanguageError: an extent is not a positive number, such as a dynamic size of a program that
            is not specialized for sizes.

    Before: ``S = W.alloc_symmetric((M, N), "bfloat16")``
    After:  ``S: W.Symmetric((M, N), "bfloat16")`` after the program's own parameters
    """
    found = {a.buffer.data: _parameter(a) for a in scratch_of(func.body)}
    if not found:
        return func

    body = on_buffers(func.body, found, lambda made: tirx.Evaluate(0))
    func = func.with_body(body)
    implicit = [
        Implicit(b.name, True, tuple(int(e) for e in b.shape[1:]), str(b.dtype), scratch=True)
        for b in found.values()
    ]
    return with_implicit(func, implicit, list(found.values()))


def on_buffers(
    body: tirx.Stmt, buffers: Mapping[tirx.Var, tirx.Buffer],
    make: Callable[[tirx.AllocBuffer], tirx.Stmt],
) -> tirx.Stmt:  # fmt: skip
    """``body`` with other buffers.

    Args:
        buffers: by the data pointer of those they stand for.
        make: what stands where one was made.
    """

    def change(node):
        new = buffers.get(node.buffer.data)
        if new is None:
            return None
        if isinstance(node, tirx.AllocBuffer):
            return make(node)
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(new, node.indices, node.predicate, node.span)
        store = tirx.BufferStore(new, node.value, node.indices, node.predicate)
        if (span := get_stmt_span(node)) is not None:
            set_stmt_span(store, span)
        return store

    kinds = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.AllocBuffer"]
    return ir_transform(body, None, change, kinds)


def scratch_of(body: tirx.Stmt) -> list[tirx.AllocBuffer]:
    """Return the allocations in ``body`` that ``W.alloc_symmetric`` made."""
    found: list[tirx.AllocBuffer] = []

    def visit(node) -> None:
        if isinstance(node, tirx.AllocBuffer) and is_scratch(node.buffer):
            found.append(node)

    post_order_visit(body, visit)
    return found


def _parameter(made: tirx.AllocBuffer) -> tirx.Buffer:
    buffer = made.buffer
    own = [tvm.arith.Analyzer().simplify(e) for e in buffer.shape[1:]]
    if any(not isinstance(e, tirx.IntImm) or int(e) < 1 for e in own):
        raise LanguageError(
            f"alloc_symmetric: {buffer.name} has shape ({', '.join(map(format_expr, own))}); "
            "expected positive constants, or dynamic extents of the parameters in a program whose "
            f"synchronisation is inferred{location(made)}"
        )
    strides = [heap_stride(itemsize(buffer.dtype)), *packed_strides(own)]
    return tirx.decl_buffer([WORLD_SIZE, *own], buffer.dtype, buffer.name, strides=strides)
