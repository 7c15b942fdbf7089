"""Refuse tiles in shared memory that the tensor cores would read at other places."""

from __future__ import annotations

from tvm import DataType, tirx

from ...builtins.errors import LanguageError
from ..ir.walk import calls_in, nodes_in, op_name

ALIGNMENTS = {1: 1024, 2: 512, 3: 256}
"""Alignment of a tile in bytes by the layout of its descriptor: swizzles of 128, 64 and 32
bytes."""


def verify_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse a tile of wgmma that does not begin at a multiple of its swizzle's repeat.

    Tensor cores swizzle addresses, threads swizzle indices of a tile. TileLang aligns most tiles,
    but not all of those that threads write: after a buffer of another size, elements of such a tile
    are read at other places.

    Before: ``v = handle_add_byte_offset(shared, 8704); initialize_wgmma_descriptor(d, v, 1, ...)``
    After:  LanguageError; legal kernels stay unchanged
    """
    offsets = {
        bind.var: int(bind.value.args[1])
        for bind in nodes_in(func.body, tirx.Bind)
        if op_name(bind.value).endswith("handle_add_byte_offset")
        and isinstance(bind.value.args[1], tirx.IntImm)
    }
    for call in calls_in(func.body, lambda c: op_name(c) == "tl.initialize_wgmma_descriptor"):
        pointer, layout = call.args[1], int(call.args[2])
        data, first = pointer.args[1], pointer.args[2]
        if data not in offsets or not isinstance(first, tirx.IntImm):
            continue
        size = DataType(str(pointer.args[0].dtype)).bits // 8
        begin, alignment = offsets[data] + int(first) * size, ALIGNMENTS.get(layout, 1)
        if begin % alignment:
            raise LanguageError(
                f"T.gemm: wgmma reads a tile from byte {begin} of shared memory; expected a "
                f"multiple of {alignment}: give each larger T.alloc_shared a multiple of "
                f"{alignment} bytes"
            )
    return func
