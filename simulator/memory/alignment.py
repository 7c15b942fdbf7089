"""Addresses and sizes that an instruction cannot have, where only the run knows them.

The memory of each tensor, of each rank's part of a symmetric one, and of each tile begins aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...builtins.bulk import MAX_BYTES
from ..report.errors import SimulationError

BULK = 16
"""Bytes to which addresses and sizes of bulk copies are aligned (PTX ISA, cp.async.bulk)."""


def require_aligned(
    frame: Any, tensor: Any, index: Sequence[int], alignment: int, op: str, loc: str
) -> None:
    """Refuse an access whose first element, at ``index``, is not at a multiple of ``alignment``
    bytes."""
    shape = tensor.shape
    flat = int(np.ravel_multi_index(tuple(index), shape, mode="clip"))
    if getattr(tensor, "symmetric", False):
        flat %= math.prod(shape[1:])
    offset = flat * tensor.dtype.itemsize
    if offset % alignment:
        at = ", ".join(map(str, index))
        raise _refused(
            frame, f"{op} at {tensor.name}[{at}], {offset} bytes after its start",
            f"a multiple of {alignment} bytes", loc,
        )  # fmt: skip


def require_bulk_size(frame: Any, tensor: Any, count: int, op: str, loc: str) -> None:
    """Refuse a bulk copy of ``count`` elements that is no multiple of 16 bytes, or too large."""
    size = count * tensor.dtype.itemsize
    if size % BULK or not 0 <= size <= MAX_BYTES:
        raise _refused(
            frame, f"{op} of {tensor.name}: size={count} elements are {size} bytes",
            f"a multiple of {BULK} bytes, at most {MAX_BYTES}", loc,
        )  # fmt: skip


def _refused(frame: Any, what: str, legal: str, loc: str) -> SimulationError:
    block = frame.block
    return SimulationError(
        "alignment",
        f"{what}, by {block.name()} in launch {block.epoch}; expected {legal}\n --> {loc}",
    )
