"""Layouts of the operands of tensor-core instructions in shared memory.

Source: PTX ISA, "Matrix descriptor".
"""

from __future__ import annotations

import numpy as np


def swizzled(address: np.ndarray, row: int) -> np.ndarray:
    """Return addresses after the swizzle of rows of 32, 64 or 128 bytes; 0 for none."""
    return address ^ ((address >> 3) & (row - 16)) if row else address


def operand_addresses(
    start: int, extent: int, k: int, itemsize: int, k_major: bool, row: int, leading: int,
    stride: int,
) -> np.ndarray:  # fmt: skip
    """Return the address of each element (m or n, k) of a ``wgmma`` operand in shared memory.

    Args:
        start: start address of the matrix descriptor.
        extent, k: sizes of the operand.
        row: bytes of the rows of the swizzle; 0 for none.
        leading, stride: byte offsets of the descriptor.
    """
    outer, inner = np.arange(extent)[:, None], np.arange(k)[None] * itemsize
    if k_major:
        if row:
            address = outer // 8 * stride + outer % 8 * row + inner
        else:
            address = outer // 8 * stride + outer % 8 * 16 + inner // 16 * leading + inner % 16
        return swizzled(start + address, row)
    depth = np.arange(k)[None]
    byte = outer * itemsize
    if row:
        address = depth // 8 * stride + depth % 8 * row + byte // row * leading + byte % row
    else:
        address = depth // 8 * leading + depth % 8 * 16 + byte // 16 * stride + byte % 16
    return swizzled(start + address, row)
