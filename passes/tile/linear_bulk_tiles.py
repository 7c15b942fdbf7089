"""Give shared tiles that bulk copies move a row-major layout."""

from __future__ import annotations

from typing import Any

from tilelang.layout import Layout
from tvm import tirx

from ...builtins.errors import LanguageError
from ...builtins.spec import builtin_of
from ..ir.walk import builtins_in, calls_in, location, op_name, rewrite_children

_LAYOUT_MAP = "layout_map"


def linear_bulk_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Give shared tiles that ``W.bulk_*`` accesses a row-major layout, because it moves raw bytes.

    TileLang may swizzle a tile for the tensor cores or the TMA. A bulk copy cannot move such a
    tile. This pass refuses operands of ``T.gemm``; TileLang refuses other conflicts.

    Before: ``tile = T.sblock_alloc_buffer(...)``
    After:  the same, with a ``layout_map`` of its block that gives ``tile`` a row-major layout
    """
    tiles: dict[tirx.Var, tirx.Buffer] = {}
    for call in builtins_in(func.body):
        if builtin_of(call).async_proxy:
            for pointer in calls_in(call, lambda c: op_name(c) == "tl.access_ptr"):
                buffer = pointer.args[0].buffer
                if buffer.scope() in ("shared", "shared.dyn"):
                    tiles[buffer.data] = buffer
    if not tiles:
        return func
    _refuse_gemm_operands(func, tiles)

    def annotate(stmt: tirx.Stmt) -> tirx.Stmt:
        stmt = rewrite_children(stmt, annotate)
        if not isinstance(stmt, tirx.SBlockRealize):
            return stmt
        block = stmt.block
        row_major = {b.data: _row_major(b) for b in block.alloc_buffers if b.data in tiles}
        if not row_major:
            return stmt
        layouts: dict[Any, Any] = {**row_major, **dict(block.annotations.get(_LAYOUT_MAP, {}))}
        block = tirx.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init,
            block.alloc_buffers, block.match_buffers, {**block.annotations, _LAYOUT_MAP: layouts},
        )  # fmt: skip
        return tirx.SBlockRealize(stmt.iter_values, stmt.predicate, block)

    return func.with_body(annotate(func.body))


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
