"""Checks of addresses and sizes that are known only at run time.

The memory of each tensor, of each rank's part of a symmetric tensor, and of each tile is aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...builtins.bulk import MAX_BYTES
from ..report.errors import SimulationError

BULK = 16
"""Alignment in bytes of addresses and sizes of bulk copies (PTX ISA, cp.async.bulk)."""


def require_aligned(
    frame: Any, tensor: Any, index: Sequence[int], alignment: int, op: str, loc: str
) -> None:
    """Refuse an access whose first element, at ``index``, is not aligned to ``alignment`` bytes."""
    shape = tensor.shape
    flat = int(np.ravel_multi_index(tuple(index), shape, mode="clip"))
    if getattr(tensor, "symmetric", False):
        flat %= math.prod(shape[1:])
    offset = flat * tensor.dtype.itemsize
    if offset % alignment:
        at = ", ".join(map(str, index))
        raise _error(
            frame, f"{op} at {tensor.name}[{at}], {offset} bytes after its start",
            f"a multiple of {alignment} bytes", loc,
        )  # fmt: skip


def require_bulk_size(frame: Any, tensor: Any, count: int, op: str, loc: str) -> None:
    """Refuse a bulk copy whose size is not a multiple of 16 bytes, or too large."""
    size = count * tensor.dtype.itemsize
    if size % BULK or not 0 <= size <= MAX_BYTES:
        raise _error(
            frame, f"{op} of {tensor.name}: size={count} elements are {size} bytes",
            f"a multiple of {BULK} bytes, at most {MAX_BYTES}", loc,
        )  # fmt: skip


def _error(frame: Any, what: str, legal: str, loc: str) -> SimulationError:
    block = frame.block
    return SimulationError(
        "alignment",
        f"{what}, by {block.place}; expected {legal}\n --> {loc}",
    )
