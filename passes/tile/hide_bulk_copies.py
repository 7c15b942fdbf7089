"""Hide bulk copies of shared memory from TileLang, which would insert barriers between them."""

from __future__ import annotations

from collections import Counter

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.spec import builtin_of
from ..ir.walk import builtins_in, nodes_in, op_name

_NO_ACCESS = 0


def hide_bulk_copies(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Hide bulk copies from TileLang's barrier insertion if only bulk copies use shared memory.

    TileLang treats a pointer to shared memory as an ordinary access and inserts a block barrier
    between two of them. Under a condition on the thread index it can only warn. But mbarriers and
    bulk waits already order a ring buffer that bulk loads fill and bulk stores empty. If threads
    access any shared memory, the barriers remain, because TileLang may place two tiles in the same
    memory.

    Before: ``T.tileweave.bulk_store(..., T.access_ptr(tile[0], "r"), ...)``
    After:  ``T.tileweave.bulk_store(..., T.access_ptr(tile[0], none), ...)``
    """
    by_bulk: Counter[tirx.Var] = Counter(
        pointer.args[0].buffer.data
        for call in builtins_in(func.body)
        if builtin_of(call).async_proxy
        for pointer in call.args
        if _is_shared_pointer(pointer)
    )
    accesses = nodes_in(func.body, tirx.BufferLoad, tirx.BufferStore)
    uses = Counter(access.buffer.data for access in accesses if _is_tile(access.buffer))
    if not by_bulk or by_bulk != uses:
        return func

    def hide(call: tirx.Call) -> tirx.Call | None:
        if not _is_shared_pointer(call):
            return None
        return tirx.Call(call.dtype, call.op, [*call.args[:-1], tirx.IntImm("int32", _NO_ACCESS)])

    return func.with_body(ir_transform(func.body, None, hide, ["tirx.Call"]))


def _is_tile(buffer: tirx.Buffer) -> bool:
    return buffer.scope() in ("shared", "shared.dyn")


def _is_shared_pointer(node) -> bool:
    return op_name(node) == "tl.access_ptr" and _is_tile(node.args[0].buffer)
