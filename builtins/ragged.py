"""Ragged symmetric tensors: data decides how many rows a rank receives, and where.

``W.alloc_ragged`` has segments with one writer each. Segment ``[dst, ..., source]`` is stored on
rank ``dst``, and only rank ``source`` writes it. The writer announces how many rows it writes in a
launch; readers obtain that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tilelang.language as T
from tilelang import tvm
from tvm import tirx

from .declaration.declare import builtin
from .declaration.operands import element
from .errors import reject
from .signals import WATCHED
from .spec import Int32, Read, ReadWrite, Uint32, Write, register_op
from .symmetric import WORLD_SIZE, checked_itemsize, is_extent, ragged_axes, ragged_scope

__all__ = [
    "alloc_ragged",
    "announce",
    "announced",
    "check_amount",
    "check_row",
]

ANNOUNCED = "tileweave.announced"
MAX_ELEMENTS = 1 << 29
"""Limit of the elements of a segment. Counters have 32 bits, and may be ahead by two launches."""

register_op(ANNOUNCED, "number of rows that a segment receives in this launch", 1)


def alloc_ragged(
    segments: int | Sequence[int] = (), *, rows: int, row: int | Sequence[int],
    dtype: str = "float32",
) -> tirx.Buffer:  # fmt: skip
    """Allocate a ragged symmetric tensor: segments of up to ``rows`` rows, each with one writer.

    In the kernel it has the shape ``(world_size, *segments, world_size, rows, *row)``. The first
    axis is the rank that stores the segment, the axis before ``rows`` is the source, the only rank
    that writes the segment. The source index of a write must be ``W.rank()``. All other indices of
    a write may be data, which other symmetric tensors do not allow::

        inbox = W.alloc_ragged(experts, rows=64, row=hidden, dtype="bfloat16")
        W.announce(inbox[dst, e, me, 0, 0], count)
        T.copy(x[t, 0:hidden], inbox[dst, e, me, row, 0])
        for i in T.serial(W.announced(inbox[me, e, source, 0, 0])):
            T.copy(inbox[me, e, source, i, 0], tile)

    In each launch, every segment that is written or read must be announced once, each row is
    written at most once, and the number of rows written is the announced number. The compiler
    inserts the synchronization: a read waits for the announcement of its segment, and for the
    announced rows of its tile. Tiles have as many rows as the largest read; if all reads are of
    single rows, the tile is the whole segment. ``pass_configs`` may choose another number by
    ``tileweave.granule``. The simulator checks the rows; see the guide on synchronization.

    Args:
        segments: extents of the axes between the storing rank and the source; may be empty.
        rows: capacity of a segment, in rows.
        row: shape of a row, in elements.
        dtype: element type of 1, 2, 4, 8 or 16 bytes.

    Raises:
        LanguageError: the element type has another size, an extent is not a positive constant, or a
            segment has too many elements.
    """
    segments, row = _shape(segments), _shape(row)
    checked_itemsize("alloc_ragged", dtype)
    for name, shape in (("segments", segments), ("rows", (rows,)), ("row", row)):
        if not all(map(_is_constant, shape)):
            value = rows if name == "rows" else shape
            raise reject("alloc_ragged", f"{name}={value}", "positive constants")
    if not row or int(rows) * _product(row) > MAX_ELEMENTS:
        legal = f"1 to {MAX_ELEMENTS} elements in a segment"
        raise reject("alloc_ragged", f"rows={rows}, row={row}", legal)
    shape = (WORLD_SIZE, *segments, WORLD_SIZE, rows, *row)
    return T.alloc_buffer(shape, dtype, scope=ragged_scope(len(segments) + 1))


@builtin(level="leader", announces=True, implicit=("total", "rows", "row_size", "tile", *WATCHED))
def announce(ref: Write, count: Int32) -> None:
    """Announce that this rank writes ``count`` rows to a segment in this launch.

    One thread of the block stores the number for the rank that holds the segment. Readers receive
    it by ``W.announced``. The call may be before or after the writes, and in another block. Every
    segment that is written or read needs exactly one announcement in each launch, at a place that
    follows from the rank, block indices and loops, even if it has 0 rows.

    A count that is negative or above the capacity of the segment ends the program with an error on
    all ranks, and nothing is stored outside of the segment.

    Args:
        ref: the first element of the segment, in a tensor of ``W.alloc_ragged``. The index of the
            source axis must be ``W.rank()``.
        count: number of rows, 0 to the capacity; may be data.
    """
    _require_segment("announce", ref)


@builtin(level="leader", checks=True, implicit=WATCHED)
def check_row(
    ref: Read, words: ReadWrite, written: ReadWrite, row: Int32, count: Int32, rows: Int32,
    units: Int32, most: Int32, launch: Uint32,
) -> None:  # fmt: skip
    """Check that the rows which the next statement writes fit, and are not yet written.

    ``pass_configs={"tileweave.check_rows": True}`` inserts a call before every write to a ragged
    tensor; programs need none. A fault ends the program with an error on all ranks that names rank,
    segment and row. The simulator ignores the call, because it checks all rows itself.

    Args:
        ref: first element that is written.
        words: word of row 0 of the segment. The word of a row has the last launch that wrote it,
            and the number of units that this launch wrote. A unit is one count of the counter.
        written: units that were written to the segment in all launches.
        row, count: first row, and number of rows.
        rows: capacity of the segment.
        units, most: units that this write stores in each row, and units of a whole row.
        launch: number of the launch.
    """


@builtin(level="thread", checks=True, implicit=WATCHED)
def check_amount(ref: Read, written: Read, total: Read, tiles: Int32) -> None:
    """Check that as many rows of a segment are written as were announced, in all launches so far.

    ``pass_configs={"tileweave.check_rows": True}`` inserts a call for each segment at the end of a
    launch; programs need none. Otherwise like ``check_row``.

    Args:
        ref: the first element of the segment.
        written: units that were written in all launches.
        total: units that were announced in all launches, of the first of ``tiles`` tiles.
        tiles: number of tiles of a segment.
    """


def announced(ref: Any) -> tirx.PrimExpr:
    """Return the number of rows that a segment receives in this launch, as an int32.

    The compiler inserts a wait for the announcement. It does not wait for the rows: a read of the
    segment does.

    Args:
        ref: the first element of the segment, in a tensor of ``W.alloc_ragged``.

    Raises:
        LanguageError: ``ref`` is not the first element of a segment.
    """
    ref = element("announced", "ref", ref, "global")
    _require_segment("announced", ref)
    return tirx.call_intrin("int32", tvm.ir.Op.get(ANNOUNCED), ref)


def _require_segment(op: str, ref: Any) -> None:
    """Refuse everything but the first element of a segment."""
    ref = element(op, "ref", ref, "global")
    axes = ragged_axes(ref.buffer)
    if not axes:
        raise reject(op, f"ref={ref.buffer.name}", "a tensor of W.alloc_ragged")
    if any(not isinstance(i, tirx.IntImm) or int(i) for i in ref.indices[1 + axes :]):
        legal = "index 0 on the axis of rows and on those of a row"
        raise reject(op, f"ref={ref}", legal)


def _shape(extents: Any) -> tuple:
    return tuple(extents) if isinstance(extents, (tuple, list)) else (extents,)


def _is_constant(extent: Any) -> bool:
    return is_extent(extent) and not (
        isinstance(extent, tirx.PrimExpr) and not isinstance(extent, tirx.IntImm)
    )


def _product(extents: Sequence[Any]) -> int:
    product = 1
    for extent in extents:
        product *= int(extent)
    return product
