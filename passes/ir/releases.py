"""Convert programs of older TileLang releases to the form that 0.1.15 traces."""

from __future__ import annotations

from tilelang import tvm
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.spec import register_op
from .walk import flatten, op_name, rewrite_children, statements_of, with_block

_INDEX = "tl.launch_thread_idx"
_EXTENTS = "tl.launch_threads"
_AXES = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
_REGION, _OLD_REGION = "tl.region", "tl.tileop.region"
_KNOWN = frozenset(map(str, tvm.ir.Op.list_op_names()))
_LOOPS = _INDEX not in _KNOWN
"""True if this TileLang opens a loop for each thread index: up to 0.1.14."""
_RENAMED = _REGION not in _KNOWN
"""True if its operator of regions has the old name: up to 0.1.13."""

if _LOOPS:
    register_op(_INDEX, "index of the thread on an axis of its block", 1, "launch_thread_idx")
if _RENAMED:
    register_op(_REGION, "part of a tensor", -1, "region")


def upgrade_ir(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace what releases before 0.1.15 represent in another way.

    All other passes and the simulator see one form. ``downgrade_ir`` undoes the change before
    TileLang's own pipeline.

    Before: ``for t in T.thread_binding(128, thread="threadIdx.x"): ...``; ``tl.tileop.region``
    After:  ``t: T.int32 = T.launch_thread_idx(0); ...``, annotated ``"tl.launch_threads": [128]``;
    ``tl.region``
    """
    if not (_LOOPS or _RENAMED):
        return func
    body = _with_thread_indices(func.body) if _LOOPS else func.body
    body = _rename_op(body, _OLD_REGION, _REGION) if _RENAMED else body
    return func if body.same_as(func.body) else func.with_body(body)


def downgrade_ir(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Undo ``upgrade_ir``, for the pipeline of the installed release.

    Before: ``t: T.int32 = T.launch_thread_idx(0); ...``; ``tl.region``
    After:  ``for t in T.thread_binding(128, thread="threadIdx.x"): ...``; ``tl.tileop.region``
    """
    if not (_LOOPS or _RENAMED):
        return func
    body = _with_thread_loops(func.body) if _LOOPS else func.body
    return func.with_body(_rename_op(body, _REGION, _OLD_REGION) if _RENAMED else body)


def _rename_op(body: tirx.Stmt, old: str, new: str) -> tirx.Stmt:
    op = tvm.ir.Op.get(new)

    def rename(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != old:
            return None
        return tirx.Call(call.dtype, op, call.args, annotations=call.annotations)

    return ir_transform(body, None, rename, ["tirx.Call"])


def _with_thread_indices(stmt: tirx.Stmt) -> tirx.Stmt:
    variables, extents, body = [], [], stmt
    while _is_thread_loop(body):
        variables.append(body.loop_var)
        extents.append(body.extent)
        body = body.body
    if not variables:
        return rewrite_children(stmt, _with_thread_indices)
    op = tvm.ir.Op.get(_INDEX)
    indices = [
        tirx.Bind(variable, tirx.call_intrin("int32", op, axis))
        for axis, variable in enumerate(variables)
    ]
    return flatten([*indices, _with_extents(body, extents)])


def _is_thread_loop(stmt: tirx.Stmt) -> bool:
    if not isinstance(stmt, tirx.For) or stmt.thread_binding is None:
        return False
    return stmt.thread_binding.thread_tag in _AXES


def _with_thread_loops(stmt: tirx.Stmt) -> tirx.Stmt:
    parts = statements_of(stmt)
    indices = [s for s in parts if op_name(getattr(s, "value", None)) == _INDEX]
    if not indices:
        return rewrite_children(stmt, _with_thread_loops)
    (block,) = [s for s in parts if isinstance(s, tirx.SBlockRealize)]
    extents = list(block.block.annotations[_EXTENTS])
    body = flatten([_with_extents(s, None) if s is block else s for s in parts if s not in indices])
    for index in reversed(indices):
        axis = int(index.value.args[0])
        inner = tirx.Var(_AXES[axis].replace(".", "_"), "int32")
        binding = tirx.IterVar(None, inner, tirx.IterVar.ThreadIndex, _AXES[axis])
        kind = tirx.ForKind.THREAD_BINDING
        body = tirx.For(index.var, tirx.IntImm("int32", 0), extents[axis], kind, body, binding)
    return body


def _with_extents(stmt: tirx.SBlockRealize, extents: list | None) -> tirx.Stmt:
    """Return the block of a kernel with ``extents`` as its annotation, or without it."""
    annotations = {key: v for key, v in stmt.block.annotations.items() if key != _EXTENTS}
    if extents is not None:
        annotations[_EXTENTS] = extents
    return with_block(stmt, annotations=annotations)
