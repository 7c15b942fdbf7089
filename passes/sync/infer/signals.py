"""Tell whoever waits that data has been written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import tirx

from ..regions.accesses import Access
from ..regions.footprints import Footprints
from ..regions.granules import Counter, elements_of
from ..regions.space import Loop
from ..regions.symbols import Symbols
from .context import SyncContext
from .edits import anchor_of, loops_kept, moved, varies


def place_signals(exchange: SyncContext) -> None:
    """Put a signal after each access that brings data others wait for.

    It adds to the granule's counter how many elements the access has stored. It leaves the loops in
    which it would tell of the same granule, unless they wait for others.

    Before: ``T.copy(tile, S[dst, row, 0])``
    After:  ``T.copy(tile, S[dst, row, 0]); T.tileweave.signal(S_arrived[dst, row // 128], 1)``
    """
    for counter in exchange.counters:
        for footprints in counter.traffic.in_kernel(counter.kind):
            _signal(exchange, counter, footprints)


def signal_depth(exchange: SyncContext, counter: Counter, footprints: Footprints) -> int:
    """How many loops around the access its signal stays in."""
    access = footprints.access
    numbers = [footprints.owner, counter.granules.of(footprints)]
    kept = loops_kept(access, footprints, numbers, clipped=True)
    if _pieces(counter, footprints, kept) is None:
        kept = loops_kept(access, footprints, [*numbers, elements_of(footprints)])
    while kept < len(access.loops) and _waits_in(exchange, access.around[kept]):
        kept += 1
    return kept


def _pieces(counter: Counter, footprints: Footprints, kept: int) -> dict[int, int] | None:
    """The loop behind ``kept`` whose rounds bring different amounts, or some nothing, if there is
    one: its number, by the axis behind the rank's along which they touch one piece after the other,
    as far as there are elements. None if they do otherwise, or there are several."""
    counts = elements_of(footprints)
    uneven = [
        number
        for number in range(kept, len(footprints.access.loops))
        if varies(counts, 1 + number, footprints.mask) or varies(footprints.mask, 1 + number)
    ]
    if not uneven:
        return {}
    number, *more = uneven
    axes = [a for a, low in enumerate(footprints.low) if low.shape[1 + number] > 1]
    if more or len(axes) != 1:
        return None
    (axis,) = axes
    low, size, mask, along = (
        footprints.low[axis],
        footprints.size[axis],
        footprints.mask,
        1 + number,
    )
    most, end = int(footprints.where(size)[0].max()), counter.granules.shape[axis]
    rounds = np.arange(low.shape[along]).reshape(-1, *[1] * (low.ndim - along - 1))
    begins = np.take(low, [0], axis=along) + rounds * most
    touched = np.take(mask, [0], axis=along) & (begins < end)
    as_told = (low == begins) & (size == np.minimum(most, end - begins))
    in_pieces = np.all(mask == touched) and np.all(as_told | ~mask)
    return {axis: number} if in_pieces else None


def _waits_in(exchange: SyncContext, loop: tirx.For | None) -> bool:
    return any(
        around is not None and loop is not None and around.same_as(loop)
        for counter in exchange.counters
        for footprints in counter.users
        for around in footprints.access.around
    )


def _signal(exchange: SyncContext, counter: Counter, footprints: Footprints) -> None:
    access, symbols = footprints.access, exchange.symbols
    kept = signal_depth(exchange, counter, footprints)
    left = access.loops[kept:]

    def simple(expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return symbols.simplified(expr, access)

    home = simple(symbols.start(footprints, 0, [*left, *access.inner]))
    granule = simple(counter.granules.index(footprints, symbols, left))
    value = simple(tirx.Cast("uint32", _count(counter, footprints, symbols, left)))
    stmt = exchange.signal_to(counter, footprints, home, granule, value)
    stmt = exchange.guarded(stmt, footprints, simple, left)
    exchange.placement.put_after(anchor_of(access, kept), stmt, access)
    reason = f"{_tells(exchange, counter, access)}{moved(left)}"
    exchange.note_of("signal", access, counter, reason, stmt, value)


def _tells(exchange: SyncContext, counter: Counter, access: Access) -> str:
    what = "adds to" if access.kind == "add" else "writes"
    whom = "the owner, who waits at the end" if counter.at_exit else "its owner"
    whom = "the copy that takes it" if counter.by_copies else whom
    everyone = (1 << exchange.world_size) - 1
    if counter.pulled:
        all_read = all(bits | 1 << home == everyone for home, bits in enumerate(counter.waiting))
        whom = "every rank" if all_read else "those who read it"
    return f"{access.op} {what} it for {whom}"


def _count(
    counter: Counter, footprints: Footprints, symbols: Symbols, left: Sequence[Loop]
) -> tirx.PrimExpr:
    """Units that an access brings in all rounds of ``left``, as an expression."""
    loops = footprints.access.loops
    kept = len(loops) - len(left)
    pieces = _pieces(counter, footprints, kept) or {}
    counts = footprints.flat(elements_of(footprints))[-1]
    count: tirx.PrimExpr = tirx.IntImm("int32", 1)
    if np.ptp(counts) == 0 and not pieces:
        count = tirx.IntImm("int32", int(counts[0]) // counter.unit)
    else:
        for axis in range(len(footprints.low)):
            rounds = symbols.inlined(loops[pieces[axis]].extent) if axis in pieces else None
            count = count * _extent(counter, footprints, axis, symbols, left, rounds)
        count = count // counter.unit
    for number in range(kept, len(loops)):
        if number not in pieces.values():
            count = count * symbols.inlined(loops[number].extent)
    return count


def _extent(
    counter: Counter, footprints: Footprints, axis: int, symbols: Symbols, left: Sequence[Loop],
    rounds: tirx.PrimExpr | None,
) -> tirx.PrimExpr:  # fmt: skip
    """How much of an axis behind the rank's one access touches, or so many ``rounds`` of it that
    touch one piece after the other, as an expression.

    Raises:
        LanguageError: conditions decide it otherwise than by an end that nothing goes beyond.
    """
    access, loops = footprints.access, [*left, *footprints.access.inner]
    low, size = footprints.where(footprints.low[axis], footprints.size[axis])
    most, end = int(size.max()), int((low + size).max())
    if rounds is not None:
        whole, end = most * rounds, counter.granules.shape[axis]
    elif np.ptp(size) == 0:
        return tirx.IntImm("int32", most)
    elif np.array_equal(size, np.minimum(most, end - low)):
        whole = tirx.IntImm("int32", most)
    elif not access.inner:
        whole = symbols.at_start(access.extents[1 + axis], loops)
        end = counter.granules.shape[axis]
    else:
        raise footprints.refused(
            f"touches {int(size.min())} to {most} elements along an axis",
            "as many each time, or fewer only before an end that nothing goes beyond",
        )
    return tirx.min(whole, end - symbols.start(footprints, 1 + axis, loops))
