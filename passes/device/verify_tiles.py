"""Refuse tiles in shared memory that the tensor cores would read at other places."""

from __future__ import annotations

from tvm import DataType, tirx

from ...builtins.errors import LanguageError
from ..ir.walk import calls_in, nodes_in, op_name

ALIGNMENTS = {1: 1024, 2: 512, 3: 256}
"""Period in bytes of the swizzle of each layout of a descriptor: of 128, 64 and 32 bytes."""


def verify_tiles(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Refuse a tile of wgmma whose first address is not a multiple of its swizzle period.

    Tensor cores swizzle the bits of addresses, but threads that write a tile swizzle its indices.
    The places are equal only if the tile is aligned to the period. TileLang does not align all
    tiles that threads write after a buffer of another size, nor the first element of a slice.

    Before: ``v = handle_add_byte_offset(shared, 8704); initialize_wgmma_descriptor(d, v, 1, ...)``
    After:  LanguageError; legal kernels stay unchanged
    """
    binds = [(bind.var, bind.value) for bind in nodes_in(func.body, tirx.Bind)]
    offsets = {var: _begin_of(value, {}) for var, value in binds}
    for call in calls_in(func.body, lambda c: op_name(c) == "tl.initialize_wgmma_descriptor"):
        begin, alignment = _begin_of(call.args[1], offsets), ALIGNMENTS.get(int(call.args[2]), 1)
        if begin is not None and begin % alignment:
            raise LanguageError(
                f"T.gemm: wgmma reads a tile from byte {begin} of shared memory; expected a "
                f"multiple of {alignment}: give each larger T.alloc_shared a multiple of "
                f"{alignment} bytes, and begin each slice at such a multiple"
            )
    return func


def _begin_of(pointer: tirx.PrimExpr, offsets: dict[tirx.Var, int | None]) -> int | None:
    """Return the offset in bytes of a tile in shared memory, or None if it is not a constant.

    Args:
        offsets: offsets of buffers in bytes, by the variables that point to them.
    """
    begin: int | None = 0
    if op_name(pointer) == "tirx.tvm_access_ptr":
        dtype, data, first, *_ = pointer.args
        begin, size = offsets.get(data), DataType(str(dtype.dtype)).bits // 8
    elif op_name(pointer) == "tirx.handle_add_byte_offset":
        first, size = pointer.args[1], 1
    else:
        return None
    if begin is None or not isinstance(first, tirx.IntImm):
        return None
    return begin + int(first) * size
