"""Wait for data before it is read, or added to."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from tvm import tirx
from tvm.ir import structural_equal

from ....builtins.errors import LanguageError
from ...ir.walk import has_loads
from ..regions.accesses import Access
from ..regions.coverage import volumes
from ..regions.data_dependent import stays_in
from ..regions.footprints import Footprints
from ..regions.granules import Counter
from ..regions.space import Loop
from . import builtin_calls
from .context import SyncContext, by_rank
from .edits import anchor_of, loops_kept, moved


def place_waits(exchange: SyncContext) -> None:
    """Put a wait before each access that needs what others bring.

    It stands outside the loops in which it would wait for the same granule, unless others wait for
    what they write: this wait could be for those. Outside a loop that may have no round it asks
    whether there is one; outside the branches of the block in a loop, whether it takes them. Where
    an earlier wait of the same block for the same granule always comes first, there is none.

    Before: ``T.copy(S[me, row, 0], tile)``
    After:  ``T.tileweave.wait_reached(S_arrived[me, row // 128], epoch * 3);
    T.copy(S[me, row, 0], tile)``
    """
    for counter in exchange.counters:
        done: list[tuple[list[tirx.PrimExpr], Access, int]] = []
        for footprints in counter.users:
            _wait(exchange, counter, footprints, done)


def wait_depth(exchange: SyncContext, counter: Counter, footprints: Footprints) -> int:
    """How many loops around the access its wait stays in."""
    access = footprints.access
    kept = loops_kept(
        access, footprints, [footprints.owner, counter.granules.of(footprints)], guarded=True
    )
    while kept < len(access.loops) and (
        _signals_in(exchange, access.loops[kept])
        or not _may_leave(exchange, counter, footprints, kept)
    ):
        kept += 1
    return kept


def _may_leave(
    exchange: SyncContext, counter: Counter, footprints: Footprints, number: int
) -> bool:
    """Whether what only the running kernel knows of a wait can be said before the loop of this
    number around its access."""
    loop = footprints.access.around[number]
    assert loop is not None
    rounds = [extent for other, extent in footprints.open_loops.items() if other > number]
    return all(
        stays_in(loop, expr, exchange.program) for expr in [*_places(counter, footprints), *rounds]
    )


def _places(counter: Counter, footprints: Footprints) -> list[tirx.PrimExpr]:
    """The indices, known only to the running kernel, that choose the counter of a wait."""
    counts = (counter.traffic.world_size, *counter.granules.counts)
    return [index for axis, index in footprints.open_axes.items() if counts[axis] > 1]


def _signals_in(exchange: SyncContext, loop: Loop) -> bool:
    return any(
        loop in footprints.access.loops
        for counter in exchange.counters
        for footprints in counter.traffic.in_kernel(counter.kind)
    )


def _wait(exchange: SyncContext, counter: Counter, footprints: Footprints, done: list) -> None:
    access, symbols, name = footprints.access, exchange.symbols, counter.traffic.tensor.name
    kept = wait_depth(exchange, counter, footprints)
    left = access.loops[kept:]
    loops = [*left, *access.inner]
    first = symbols.simplified(symbols.start(footprints, 0, loops), access)
    key = [first, counter.granules.index(footprints, symbols, left)]
    for other_key, other, other_kept in done:
        if structural_equal(key, other_key) and dominates(other, other_kept, access, kept):
            exchange.note("wait", access, name, f"the wait at {other.line} serves for it, too")
            return
    rounds = [
        footprints.open_loops[number] if number in footprints.open_loops
        else symbols.at_start(loop.extent, left)
        for number, loop in enumerate(left, kept)
        if number in footprints.open_loops or number in footprints.skipped
    ]  # fmt: skip
    is_fixed = not any(has_loads(index) for index in _places(counter, footprints))
    if is_fixed and not footprints.outside and not footprints.asked and not rounds:
        done.append((key, access, kept))
    home = symbols.simplified(symbols.start(footprints, 0, loops, in_place=True), access)
    granule = counter.granules.index(footprints, symbols, left, in_place=True)
    arrivals = _arrivals(counter, footprints, home, granule)
    target = exchange.epochs_of(counter.traffic.tensor) * arrivals
    flag = exchange.flag(counter, symbols.rank, home, granule)
    peer = tirx.IntImm("int32", -1)
    stmt = builtin_calls.wait_reached(flag, target, peer, access)
    inside = access.conditions[access.guards[kept] :] if left else ()
    asked = [symbols.at_start(condition, left) for condition in inside]
    if _reads_own(counter, footprints):
        asked.append(tirx.NE(tirx.floordiv(granule, counter.own), symbols.rank))
    if asked:
        holds = symbols.simplified(functools.reduce(tirx.And, asked), access)
        stmt = tirx.IfThenElse(holds, stmt, None)
    stmt = exchange.guarded(stmt, footprints, lambda e: symbols.simplified(e, access), left)
    for extent in rounds:
        some = tirx.GT(extent, 0)
        stmt = tirx.IfThenElse(symbols.simplified(some, access), stmt, None)
    exchange.placement.put_before(anchor_of(access, kept), stmt, access)
    needs = {
        "read": f"reads what {'additions' if counter.kind == 'add' else 'writes'} bring",
        "add": "adds to what must have been cleared",
    }[access.kind]
    if not footprints.is_certain:
        needs += "; which part, only the running kernel knows"
    exchange.note_of("wait", access, counter, f"{access.op} {needs}{moved(left)}", stmt, arrivals)


def _reads_own(counter: Counter, footprints: Footprints) -> bool:
    """Whether some ranks read what lies there when their kernel starts."""
    if not counter.own:
        return False
    rank, granule = footprints.distinct(footprints.rank, counter.granules.of(footprints))
    return bool(np.any(granule // counter.own == rank))


def dominates(one: Access, one_kept: int, other: Access, other_kept: int) -> bool:
    """Whether a wait for ``one`` comes first, in the same round, where ``other`` needs one."""
    if one_kept > other_kept or one.place > other.place:
        return False
    loops = all(
        a.var.same_as(b.var)
        for a, b in zip(one.loops[:one_kept], other.loops[:one_kept], strict=True)
    )
    return (
        loops
        and len(other.conditions) >= len(one.conditions)
        and all(a.same_as(b) for a, b in zip(one.conditions, other.conditions, strict=False))
    )


def _arrivals(
    counter: Counter, footprints: Footprints, at: tirx.PrimExpr, granule: tirx.PrimExpr
) -> tirx.PrimExpr:
    """Units that arrive in the granule in each launch, as an expression."""
    arrivals, granules = counter.arrivals, counter.granules
    home, number = footprints.distinct(footprints.owner, granules.of(footprints))
    seen = arrivals[home, number]
    values = np.unique(seen)
    if len(values) == 1:
        return tirx.const(int(values[0]), "uint32")
    by_home = [np.unique(seen[home == r]) for r in range(len(arrivals))]
    if all(len(v) <= 1 for v in by_home):
        return by_rank(at, [int(v[0]) if len(v) else 0 for v in by_home])
    ends = _ends(counter)
    elements = volumes(granules.shape, granules.size, ends).ravel()[number]
    times = np.unique(seen * counter.unit // np.maximum(elements, 1))
    if len(times) == 1 and np.array_equal(seen * counter.unit, elements * times[0]):
        return _clipped(counter, granule, int(times[0]), ends)
    raise LanguageError(
        f"{footprints.access.text}: its granules of {granules.text} elements get "
        f"{int(values[0]) * counter.unit} to {int(values[-1]) * counter.unit} elements a launch; "
        "expected as many in each, or each written whole; choose tileweave.granule, or signals and "
        f"waits written by hand{footprints.access.location}"
    )


def _ends(counter: Counter) -> tuple[int, ...]:
    """Where on each axis ends what arrives."""
    bounds = [footprints.bounds for footprints in counter.traffic.of_kind(counter.kind)]
    axes = zip(*bounds, strict=True)
    return tuple(max(int(high.max(initial=0)) for _, high in axis) for axis in axes)


def _clipped(
    counter: Counter, granule: tirx.PrimExpr, times: int, ends: Sequence[int]
) -> tirx.PrimExpr:
    """The same as an expression, in units, if nothing arrives behind ``ends``."""
    elements: tirx.PrimExpr = tirx.IntImm("int32", times)
    left = granule
    granules = counter.granules
    for count, size, extent in reversed(
        list(zip(granules.counts, granules.size, ends, strict=True))
    ):
        elements = elements * tirx.min(size, extent - tirx.floormod(left, count) * size)
        left = tirx.floordiv(left, count)
    return tirx.Cast("uint32", elements // counter.unit)
