"""Copy tiles that the TMA would copy wrongly without it."""

from __future__ import annotations

import math

from tvm import DataType, tirx
from tvm.arith import Analyzer
from tvm.target import Target
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.symmetric import is_packed, packed_strides
from ...builtins.versions import installed_tilelang
from ..ir.tma import TMA_COPY, TMA_SM, sm_of, without_tma
from ..ir.walk import location, nodes_in, op_name

_COPY = "tl.tileop.copy"
ALIGNMENT = 128
"""Bytes that an address of the TMA in shared memory is a multiple of (PTX ISA, "Tensor copies")."""
_USES_STRIDES = (0, 1, 13)
"""First release whose bulk copies use the strides of the tensor (``Copy::LowerBulk1D``)."""


def avoid_tma(func: tirx.PrimFunc, target: Target, is_retry: bool) -> tirx.PrimFunc:
    """Copy by threads what TileLang would copy wrongly by the TMA.

    - A tile that begins between two multiples of 128 bytes. TileLang gives a tile of a pipelined
      loop one part of shared memory for each stage, without space in between, so the parts of a
      tile of 32 bytes begin 32 bytes apart. A copy to the second one by the TMA ends the kernel
      with "misaligned address". So does a copy to a part of a tile.
    - A contiguous part of a strided tensor, with TileLang 0.1.12. This release copies it by one
      bulk copy, and computes its address from the shape of the tensor. The part of another rank
      then has a wrong address. It also fails for tiles of one axis.
    - A part of a tile in shared memory between whose rows other elements are, if TileLang fails to
      lower the program, or lowers it wrongly.

    Args:
        is_retry: whether TileLang has failed for the form without these changes.

    Raises:
        LanguageError: the copy is a ``T.tma_copy``, which has no other form.

    Before: ``for i in T.Pipelined(n, num_stages=2): T.copy(x[i, 0], tile)`` with 32 bytes
    After:  ``for i in T.Pipelined(n, num_stages=2): T.copy(x[i, 0], tile, disable_tma=True)``
    """
    if sm_of(target) < TMA_SM:
        return func
    ignores_strides = installed_tilelang() < _USES_STRIDES
    staged = _staged_tiles(func)

    for stmt in nodes_in(func.body, tirx.Evaluate):
        if op_name(stmt.value) != TMA_COPY:
            continue
        if ignores_strides and any(map(_may_be_linear, stmt.value.args[:2])):
            raise LanguageError(
                "T.tma_copy: TileLang 0.1.12 ignores the strides of a tensor whose part is "
                f"contiguous; expected T.copy, or tilelang==0.1.13{location(stmt)}"
            )
        if not _is_aligned(stmt.value, staged):
            raise LanguageError(
                f"T.tma_copy: the tile does not always begin at a multiple of {ALIGNMENT} bytes; "
                f"expected T.copy, or a tile of a multiple of {ALIGNMENT} bytes{location(stmt)}"
            )

    def change(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != _COPY:
            return None
        is_wrong = (
            not _is_aligned(call, staged)
            or (ignores_strides and any(map(_may_be_linear, call.args[:2])))
            or (is_retry and any(map(_has_gaps, call.args[:2])))
        )
        return without_tma(call) if is_wrong else None

    body = ir_transform(func.body, None, change, ["tirx.Call"])
    return func if body.same_as(func.body) else func.with_body(body)


def _staged_tiles(func: tirx.PrimFunc) -> set[tirx.Var]:
    """Return the tiles that a pipelined loop may load in several stages."""
    return {
        region.args[0].buffer.data
        for loop in nodes_in(func.body, tirx.For)
        if int(loop.annotations.get("num_stages", 0)) > 1
        for copy in nodes_in(loop.body, tirx.Call)
        if op_name(copy) in (_COPY, TMA_COPY)
        for region in copy.args[1:2]
    }


def _is_aligned(copy: tirx.Call, staged: set[tirx.Var]) -> bool:
    """Return whether tiles in shared memory begin at a multiple of the alignment, in each of their
    stages."""
    return all(
        _begins_aligned(region.args[0], region.args[0].buffer.data in staged)
        for region in copy.args[:2]
        if region.args[0].buffer.scope().startswith("shared")
    )


def _begins_aligned(start: tirx.BufferLoad, is_staged: bool) -> bool:
    buffer, bits = start.buffer, DataType(str(start.buffer.dtype)).bits
    if is_staged and math.prod(map(int, buffer.shape)) * bits % (8 * ALIGNMENT):
        return False
    strides = packed_strides(buffer.shape)
    offset = sum(
        (i * s for i, s in zip(start.indices, strides, strict=True)), tirx.IntImm("int32", 0)
    )
    known = Analyzer().modular_set(Analyzer().simplify(offset * bits))
    return not known.coeff % (8 * ALIGNMENT) and not known.base % (8 * ALIGNMENT)


def _may_be_linear(region: tirx.PrimExpr) -> bool:
    """Return whether a region of a strided tensor may be contiguous in its last axes."""
    start, _, *extents = region.args
    buffer = start.buffer
    if buffer.scope() != "global" or is_packed(buffer):
        return False
    axes = [(_constant(size), _constant(n)) for size, n in zip(buffer.shape, extents, strict=True)]
    while axes and (axes[-1][0] is None or axes[-1][0] == axes[-1][1] or axes[-1][1] is None):
        axes.pop()
    return all(extent in (None, 1) for _, extent in axes[:-1])


def _has_gaps(region: tirx.PrimExpr) -> bool:
    """Return whether ``region`` is a part of a tile in shared memory that is not contiguous."""
    if op_name(region) != "tl.region" or not region.args[0].buffer.scope().startswith("shared"):
        return False
    start, _, *extents = region.args
    axes = list(zip(start.buffer.shape, extents, strict=True))
    equal = Analyzer().can_prove_equal
    while axes and equal(*axes[-1]):
        axes.pop()
    return any(not equal(extent, 1) for _, extent in axes[:-1])


def _constant(expr: tirx.PrimExpr) -> int | None:
    return int(expr) if isinstance(expr, tirx.IntImm) else None
