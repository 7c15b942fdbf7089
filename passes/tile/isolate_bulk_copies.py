"""Keep TileLang's layouts and barriers from the shared memory that bulk copies move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tilelang.layout import Layout
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.walk import (
    builtins_in,
    calls_in,
    location,
    nodes_in,
    op_name,
    rewrite_children,
    with_block,
)

_LAYOUT_MAP = "layout_map"
_NO_ACCESS = 0


def isolate_bulk_copies(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give tiles that ``W.bulk_*`` accesses a row-major layout, and hide the accesses if there are
    no others of shared memory.

    TileLang may swizzle a tile for the tensor cores or the TMA. A bulk copy moves raw bytes, so it
    cannot move such a tile. This pass refuses operands of ``T.gemm``; TileLang refuses other
    conflicts.

    TileLang treats a pointer to shared memory as an ordinary access and inserts a block barrier
    between two of them. Under a condition on the thread index it can only warn. But mbarriers and
    bulk waits already order a ring buffer that bulk loads fill and bulk stores empty. If threads
    access any shared memory, the barriers remain, because TileLang may place two tiles in the same
    memory.

    Before: ``tile = T.sblock_alloc_buffer(...)``;
    ``T.tileweave.bulk_store(..., T.access_ptr(tile[0], "r"), ...)``
    After:  the same, with a ``layout_map`` of its block that gives ``tile`` a row-major layout;
    ``T.tileweave.bulk_store(..., T.access_ptr(tile[0], none), ...)``
    """
    pointers = [
        pointer
        for call in builtins_in(func.body)
        if builtin_of(call).async_proxy
        for pointer in calls_in(call, _is_shared_pointer)
    ]
    if not pointers:
        return func
    tiles = {p.args[0].buffer.data: p.args[0].buffer for p in pointers}
    _refuse_gemm_operands(func, tiles)
    return _without_accesses(func.with_body(_with_layouts(func.body, tiles)), pointers)


def _with_layouts(stmt: tirx.Stmt, tiles: dict[tirx.Var, tirx.Buffer]) -> tirx.Stmt:
    stmt = rewrite_children(stmt, lambda s: _with_layouts(s, tiles))
    if not isinstance(stmt, tirx.SBlockRealize):
        return stmt
    block = stmt.block
    row_major = {b.data: _row_major(b) for b in block.alloc_buffers if b.data in tiles}
    if not row_major:
        return stmt
    layouts: dict[Any, Any] = {**row_major, **dict(block.annotations.get(_LAYOUT_MAP, {}))}
    return with_block(stmt, annotations={**block.annotations, _LAYOUT_MAP: layouts})


def _without_accesses(func: tirx.PrimFunc, pointers: list[tirx.Call]) -> tirx.PrimFunc:
    """Hide the accesses of ``pointers`` if there is no other access of shared memory."""
    accesses = nodes_in(func.body, tirx.BufferLoad, tirx.BufferStore)
    uses = Counter(access.buffer.data for access in accesses if _is_tile(access.buffer))
    if Counter(pointer.args[0].buffer.data for pointer in pointers) != uses:
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


def _row_major(buffer: tirx.Buffer) -> Layout:
    def offset(*indices: tirx.Var) -> tirx.PrimExpr:
        flat: Any = 0
        for index, extent in zip(indices, buffer.shape, strict=True):
            flat = flat * extent + index
        return flat

    return Layout(buffer.shape, offset)


def _refuse_gemm_operands(func: tirx.PrimFunc, tiles: dict[tirx.Var, tirx.Buffer]) -> None:
    def refuse(stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.Evaluate) and op_name(stmt.value).startswith("tl.tileop.gemm"):
            for region in calls_in(stmt, lambda c: op_name(c) == "tl.region"):
                buffer = region.args[0].buffer
                if buffer.data in tiles:
                    raise LanguageError(
                        f"bulk copy: {buffer.name} is also an operand of T.gemm, which needs a "
                        "swizzled layout, but a bulk copy needs a row-major one; expected T.copy "
                        f"instead of the bulk copy, or separate tiles{location(stmt)}"
                    )
        return rewrite_children(stmt, refuse)

    refuse(func.body)
