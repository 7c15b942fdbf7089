"""Copy parts of shared memory that the TMA cannot address without it."""

from __future__ import annotations

import math

from tvm import DataType, tirx
from tvm.arith import Analyzer
from tvm.target import Target
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.errors import LanguageError
from ...builtins.symmetric import packed_strides
from ..ir.tma import TMA_COPY, TMA_SM, sm_of, without_tma
from ..ir.walk import location, nodes_in, op_name

_COPIES = ("tl.tileop.copy", TMA_COPY)
ALIGNMENT = 128
"""Bytes that an address of the TMA in shared memory is a multiple of (PTX ISA, "Tensor copies")."""


def align_tma(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Copy tiles that would begin between two multiples of 128 bytes without the TMA.

    TileLang gives a tile of a pipelined loop one part of shared memory for each stage, without
    space in between. The parts of a tile of 32 bytes begin 32 bytes apart, and a copy to the second
    one by the TMA ends the kernel with "misaligned address". So does a copy to a part of a tile.

    Raises:
        LanguageError: the copy is a ``T.tma_copy``, which has no other form.

    Before: ``for i in T.Pipelined(n, num_stages=2): T.copy(x[i, 0], tile)`` with 32 bytes
    After:  ``for i in T.Pipelined(n, num_stages=2): T.copy(x[i, 0], tile, disable_tma=True)``
    """
    if sm_of(target) < TMA_SM:
        return func
    staged = {
        region.args[0].buffer.data
        for loop in nodes_in(func.body, tirx.For)
        if int(loop.annotations.get("num_stages", 0)) > 1
        for copy in nodes_in(loop.body, tirx.Call)
        if op_name(copy) in _COPIES
        for region in copy.args[1:2]
    }

    def is_aligned(copy: tirx.Call) -> bool:
        tiles = [r.args[0] for r in copy.args[:2] if _is_shared(r.args[0].buffer)]
        return all(_is_aligned(tile, tile.buffer.data in staged) for tile in tiles)

    for stmt in nodes_in(func.body, tirx.Evaluate):
        if op_name(stmt.value) == TMA_COPY and not is_aligned(stmt.value):
            raise LanguageError(
                f"T.tma_copy: the tile does not always begin at a multiple of {ALIGNMENT} bytes; "
                f"expected T.copy, or a tile of a multiple of {ALIGNMENT} bytes{location(stmt)}"
            )

    def change(call: tirx.Call) -> tirx.Call | None:
        if op_name(call) != _COPIES[0] or is_aligned(call):
            return None
        return without_tma(call)

    return func.with_body(ir_transform(func.body, None, change, ["tirx.Call"]))


def _is_shared(buffer: tirx.Buffer) -> bool:
    return buffer.scope().startswith("shared")


def _is_aligned(start: tirx.BufferLoad, is_staged: bool) -> bool:
    """Return whether a tile begins at a multiple of the alignment, in each of its stages."""
    buffer, bits = start.buffer, DataType(str(start.buffer.dtype)).bits
    if is_staged and math.prod(map(int, buffer.shape)) * bits % (8 * ALIGNMENT):
        return False
    strides = packed_strides(buffer.shape)
    offset = sum(
        (i * s for i, s in zip(start.indices, strides, strict=True)), tirx.IntImm("int32", 0)
    )
    known = Analyzer().modular_set(Analyzer().simplify(offset * bits))
    return not known.coeff % (8 * ALIGNMENT) and not known.base % (8 * ALIGNMENT)
