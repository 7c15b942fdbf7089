"""Write thread indices as TileLang 0.1.15 does, for older releases too."""

from __future__ import annotations

from typing import Any

from tilelang import tvm
from tvm import tirx

from ...builtins.spec import register_op
from ..ir.walk import flatten, op_name, rewrite_children, statements_of, with_span_of

_INDEX = "tl.launch_thread_idx"
_EXTENTS = "tl.launch_threads"
_AXES = ("threadIdx.x", "threadIdx.y", "threadIdx.z")

try:
    tvm.ir.Op.get(_INDEX)
    IS_STOCK = True
except Exception:  # TVM raises an AttributeError or its own error, by release
    IS_STOCK = False
    register_op(_INDEX, "index of the thread on an axis of its block", 1, "launch_thread_idx")


def index_threads(func: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
    """Replace loops that are bound to thread indices by variables.

    Up to release 0.1.14, TileLang opens a loop for each axis of the block. Later releases bind a
    variable for each axis, and keep the extents in an annotation. All passes and the simulator see
    the later form.

    Before: ``for t in T.thread_binding(128, thread="threadIdx.x"): ...``
    After:  ``t: T.int32 = T.launch_thread_idx(0); ...``, annotated ``"tl.launch_threads": [128]``
    """
    return func if IS_STOCK else func.with_body(_indexed(func.body))


def restore_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Undo ``index_threads``, for the pipeline of a release that only knows loops.

    Before: ``t: T.int32 = T.launch_thread_idx(0); ...``
    After:  ``for t in T.thread_binding(128, thread="threadIdx.x"): ...``
    """
    return func if IS_STOCK else func.with_body(_looped(func.body))


def _indexed(stmt: tirx.Stmt) -> tirx.Stmt:
    variables, extents, body = [], [], stmt
    while _is_thread_loop(body):
        variables.append(body.loop_var)
        extents.append(body.extent)
        body = body.body
    if not variables:
        return rewrite_children(stmt, _indexed)
    op = tvm.ir.Op.get(_INDEX)
    indices = [
        tirx.Bind(variable, tirx.call_intrin("int32", op, axis))
        for axis, variable in enumerate(variables)
    ]
    return flatten([*indices, _annotated(body, extents)])


def _is_thread_loop(stmt: tirx.Stmt) -> bool:
    if not isinstance(stmt, tirx.For) or stmt.thread_binding is None:
        return False
    return stmt.thread_binding.thread_tag in _AXES


def _looped(stmt: tirx.Stmt) -> tirx.Stmt:
    parts = statements_of(stmt)
    indices = [s for s in parts if op_name(getattr(s, "value", None)) == _INDEX]
    if not indices:
        return rewrite_children(stmt, _looped)
    body = flatten([s for s in parts if s not in indices])
    block = next(s for s in statements_of(body) if isinstance(s, tirx.SBlockRealize))
    extents = list(block.block.annotations[_EXTENTS])
    body = flatten([_annotated(s, None) if s.same_as(block) else s for s in statements_of(body)])
    for index in reversed(indices):
        axis = int(index.value.args[0])
        name = _AXES[axis]
        inner = tirx.Var(name.replace(".", "_"), "int32")
        binding = tirx.IterVar(None, inner, tirx.IterVar.ThreadIndex, name)
        body = tirx.For(
            index.var,
            tirx.IntImm("int32", 0),
            extents[axis],
            tirx.ForKind.THREAD_BINDING,
            body,
            binding,
        )
    return body


def _annotated(stmt: tirx.Stmt, extents: list | None) -> tirx.Stmt:
    """Return the block of a kernel with ``extents`` as its annotation, or without it."""
    block = stmt.block
    annotations = dict(block.annotations.items())
    annotations.pop(_EXTENTS, None)
    if extents is not None:
        annotations[_EXTENTS] = extents
    block = tirx.SBlock(
        block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init,
        block.alloc_buffers, block.match_buffers, annotations,
    )  # fmt: skip
    return with_span_of(stmt, tirx.SBlockRealize(stmt.iter_values, stmt.predicate, block))
