"""Ragged symmetric tensors: data decides how many rows a rank receives, and where.

``W.alloc_ragged`` has segments with one writer each. Segment ``[dst, ..., source]`` is stored on
rank ``dst``, and only rank ``source`` writes it. The writer announces how many rows it writes in a
launch; readers obtain that number. ``W.alloc_packed`` has one segment on each rank, which all ranks
write without gaps between the sources.
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
from .spec import Int32, Read, ReadWrite, UInt32, Write, register_op
from .symmetric import (
    PACKED_SCOPE,
    WORLD_SIZE,
    checked_itemsize,
    is_extent,
    is_packed,
    ragged_axes,
    ragged_scope,
)

__all__ = [
    "alloc_packed",
    "alloc_ragged",
    "announce",
    "announced",
    "check_amount",
    "check_row",
    "pad",
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
    _require_segments("alloc_ragged", segments, rows, row, dtype)
    shape = (WORLD_SIZE, *segments, WORLD_SIZE, rows, *row)
    return T.alloc_buffer(shape, dtype, scope=ragged_scope(len(segments) + 1))


def alloc_packed(*, rows: int, row: int | Sequence[int], dtype: str = "float32") -> tirx.Buffer:
    """Allocate packed rows: a symmetric tensor in which data chooses the place of each row.

    In the kernel it has the shape ``(world_size, rows, *row)``; the first axis is the rank that
    stores the rows. Any rank may write any row. So the rows of all sources may be adjacent, and a
    GEMM reads whole tiles of them. In each launch, each row is written once, by one rank, or its
    owner declares it as padding::

        inbox = W.alloc_packed(rows=4096, row=hidden, dtype="bfloat16")
        T.copy(x[t, 0:hidden], inbox[dst, start + i, 0])
        W.pad(inbox[me, end, 0], 4096 - end)
        T.copy(inbox[me, tile * 64, 0], A_tile)

    First, the ranks exchange their numbers of rows in a tensor of ``W.alloc_symmetric``, and
    compute where their rows start. The compiler inserts the synchronization: a read waits until all
    rows of its tile are written or padding. Tiles have as many rows as the largest read; if all
    reads are of single rows, the tile is the whole tensor. ``pass_configs`` may choose another
    number by ``tileweave.granule``. Only the owner reads the rows. In each launch, it reads all
    tiles with written rows. The simulator checks this; see the guide on synchronization.

    Args:
        rows: rows of each rank's copy.
        row: shape of a row, in elements.
        dtype: element type of 1, 2, 4, 8 or 16 bytes.

    Raises:
        LanguageError: the element type has another size, an extent is not a positive constant, or
            a copy has too many elements.
    """
    row = _shape(row)
    _require_segments("alloc_packed", (), rows, row, dtype)
    return T.alloc_buffer((WORLD_SIZE, rows, *row), dtype, scope=PACKED_SCOPE)


def _require_segments(op: str, segments: tuple, rows: int, row: tuple, dtype: str) -> None:
    checked_itemsize(op, dtype)
    for name, shape in (("segments", segments), ("rows", (rows,)), ("row", row)):
        if not all(map(_is_constant, shape)):
            value = rows if name == "rows" else shape
            raise reject(op, f"{name}={value}", "positive constants")
    if not row or int(rows) * _product(row) > MAX_ELEMENTS:
        legal = f"1 to {MAX_ELEMENTS} elements in a segment"
        raise reject(op, f"rows={rows}, row={row}", legal)


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


@builtin(
    level="leader", pads=True,
    implicit=("element", "row", "rows", "row_size", "tile", *WATCHED),
)  # fmt: skip
def pad(ref: Write, count: Int32) -> None:
    """Declare that no rank writes ``count`` packed rows in this launch, beginning at ``ref``.

    One thread of the block counts the rows as arrived, so that readers of their tiles do not wait
    for them. Their contents are undefined. Each row of each rank needs exactly one write or one
    declaration in each launch: rows between two experts, and those after the last one.

    A range outside of the tensor, or a negative ``count``, ends the program with an error on all
    ranks. So a launch that pads up to the last row also ends if its rows exceed the capacity.

    Args:
        ref: first element of the first row, in the own copy of a tensor of ``W.alloc_packed``. The
            index of the row may be data.
        count: number of rows, 0 or more; may be data.
    """
    ref = element("pad", "ref", ref, "global")
    if not is_packed(ref.buffer):
        raise reject("pad", f"ref={ref.buffer.name}", "a tensor of W.alloc_packed")
    _require_zero("pad", ref, 2, "those of a row")


@builtin(level="leader", checks=True, implicit=WATCHED)
def check_row(
    ref: Read, words: ReadWrite, written: ReadWrite, row: Int32, count: Int32, rows: Int32,
    units: Int32, most: Int32, launch: UInt32,
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
    _require_zero(op, ref, 1 + axes, "the axis of rows and on those of a row")


def _require_zero(op: str, ref: tirx.BufferLoad, first: int, axes: str) -> None:
    """Refuse an index other than 0 from axis ``first`` on."""
    if any(not isinstance(i, tirx.IntImm) or int(i) for i in ref.indices[first:]):
        raise reject(op, f"ref={ref}", f"index 0 on {axes}")


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
