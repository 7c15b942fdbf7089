"""Checks of the rows of ragged tensors on GPUs, which an option inserts."""

from __future__ import annotations

from ..declare import builtin
from ..signals import WATCHED
from ..spec import Int32, Read, ReadWrite, UInt32

__all__ = ["check_amount", "check_row"]


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
        words: word of row 0 of the segment: the last launch that wrote the row, and units of it.
        written: units that were written to the segment in all launches.
        row, count: first row, and number of rows.
        rows: capacity of the segment.
        units, most: units that are written to each row, and units of a whole row.
        launch: number of the launch.
    """


@builtin(level="thread", checks=True, implicit=WATCHED)
def check_amount(ref: Read, written: Read, total: Read) -> None:
    """Check that as many rows of a segment are written as were announced, in all launches so far.

    ``pass_configs={"tileweave.check_rows": True}`` inserts a call for each segment at the end of a
    launch; programs need none. Otherwise like ``check_row``.

    Args:
        ref: the first element of the segment.
        written, total: units that were written and announced in all launches.
    """
