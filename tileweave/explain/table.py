"""Explanation as a text table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..passes.ir.sizes import format_sizes
from .operation import Operation
from .short_paths import path_shortener

if TYPE_CHECKING:
    from .explanation import Explanation

_HEAD = "line", "kind", "tensor", "granule", "amount", "per block", "why"
_WIDEST_AMOUNT = 28
"""Longest amount that the table shows, in characters."""
_UNKNOWN, _VARIES = "?", "varies"


def table_lines(e: Explanation) -> Iterator[str]:
    """Yield the title, one row per operation, and the notes and lists below the table."""
    shorten = path_shortener(e)
    sizes = f", {format_sizes(e.sizes)}" if e.sizes else ""
    yield f"{e.title}{sizes}"
    if not e.ops:
        yield "  nothing is inserted: no rank reads what another rank writes, or verify is off"
    has_several_kernels = len({op.kernel for op in e.ops}) > 1
    rows = [_row(op, has_several_kernels, shorten) for op in e.ops]
    yield from _aligned(rows)
    yield from _notes(rows)
    yield from map(shorten, details(e))


def _row(op: Operation, with_kernel: bool, shorten: Callable[[str], str]) -> tuple[str, ...]:
    line = shorten(f"{op.file}:{op.line}") if op.file else "-"
    times = _UNKNOWN if op.per_block is None else str(op.per_block)
    amount = op.amount if len(op.amount) <= _WIDEST_AMOUNT else _VARIES
    reason = shorten(f"{op.kernel}: {op.reason}" if with_kernel else op.reason)
    return line, op.kind, op.tensor or "-", op.granule or "-", amount or "-", times, reason


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    table = [_HEAD, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(_HEAD) - 1)]
    for row in table:
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=False))
        yield "  " + "  ".join([*cells, row[-1]]).rstrip()


def _notes(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the meaning of the signs that stand for a value that the table does not show."""
    if any(row[_HEAD.index("per block")] == _UNKNOWN for row in rows):
        yield f"{_UNKNOWN} per block: a loop around it whose iterations are counted at run time"
    if any(row[_HEAD.index("amount")] == _VARIES for row in rows):
        yield f"amount {_VARIES}: it depends on rank, block or iteration; --json prints the formula"


def details(e: Explanation) -> Iterator[str]:
    """Yield the accesses without an operation of their own, and the memory of the program."""
    for title, ops in (
        ("not needed", e.merged),
        ("not ordered, by W.unordered", e.unordered),
        ("nothing is inferred", e.explicit),
        ("not verified", e.unverified),
    ):
        if ops:
            yield f"{title}:"
            yield from (f"  {op.file}:{op.line}  {op.tensor}: {op.reason}" for op in ops)
    for title, reasons in (
        ("protocols (tileweave.protocol)", e.protocols),
        ("assumed, and checked by the simulator", e.assumed),
        ("memory is used again in the same launch because", e.versions),
        ("memory is used again in the next launch because", e.reuse),
    ):
        if reasons:
            yield f"{title}:"
            width = max(map(len, reasons))
            yield from (f"  {name:{width}}  {reason}" for name, reason in reasons.items())
    for title, sizes in (("counters", e.flags), ("scratch memory", e.scratch)):
        if sizes:
            tensors = ", ".join(f"{name} {size}" for name, size in sizes.items())
            yield f"{title}: {sum(sizes.values())} bytes on each rank ({tensors})"
