"""Register layouts of tensor-core instructions, and layouts of their operands in shared memory.

Each function returns, for thread (or lane) and register element, the place in the matrix.
Source: PTX ISA, "Matrix fragments for mma", "Register fragments for wgmma", "Matrix descriptor".
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_LANES = np.arange(32)[:, None]


@lru_cache(maxsize=64)
def mma_a(itemsize: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of A of ``mma.m16n8k``, by lane and element."""
    packed = 4 // itemsize
    element = np.arange(16 * k // 32)[None]
    register = element // packed
    row = _LANES // 4 + 8 * (register % 2)
    column = (_LANES % 4) * packed + element % packed + 4 * packed * (register // 2)
    return row, column


@lru_cache(maxsize=64)
def mma_b(itemsize: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row of k, column of n) of B of ``mma.m16n8k``, by lane and element."""
    packed = 4 // itemsize
    element = np.arange(8 * k // 32)[None]
    row = (_LANES % 4) * packed + element % packed + 4 * packed * (element // packed)
    return row, np.broadcast_to(_LANES // 4, row.shape)


@lru_cache(maxsize=64)
def accumulator(columns: int, warps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, column) of an accumulator of 16 rows for each of ``warps`` warps, by thread."""
    thread = np.arange(32 * warps)[:, None]
    element = np.arange(columns // 2)[None]
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (element // 2 % 2)
    column = (thread % 4) * 2 + element % 2 + 8 * (element // 4)
    return row, column


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
