"""Signals: publish data to the ranks that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from tilelang import tvm
from tvm import tirx
from tvm.ir import structural_equal

from ...ir.walk import variables_in
from ..regions.accesses import Access
from ..regions.footprints import Footprints
from ..regions.granules import Counter, elements_of
from ..regions.space import Loop
from ..regions.symbols import Symbols, quotient
from .context import SyncContext
from .edits import anchor_of, enclosing_depth, moved_out_of, varies
from .waits import may_leave_loop


def place_signals(context: SyncContext) -> None:
    """Insert a signal after each access that writes data which other blocks wait for.

    The signal adds the number of stored elements, in units, to the counter of the granule. It is
    moved out of loops in which the granule does not change, unless these loops contain waits.
    Accesses whose signals would follow each other and change the same counter share one signal. No
    signal is inserted for granules that no rank waits for in any launch.

    Before: ``T.copy(tile, S[dst, row, 0])``
    After:  ``T.copy(tile, S[dst, row, 0]); T.tileweave.signal(S_arrived[dst, row // 128], 1)``
    """
    for counter in context.signalled_counters:
        signals: list[_Signal] = []
        awaited = _awaited_granules(counter)
        for footprints in counter.accesses.in_kernel(counter.kind):
            access = footprints.access
            need = _need_of(counter, footprints, awaited)
            if need is _Need.NEVER:
                name = counter.accesses.tensor.name
                context.record("signal", access, name, f"no rank waits for what {access.text}")
            else:
                _add(signals, _signal(context, counter, footprints, need))
        for signal in signals:
            _place(context, counter, signal)


class _Need(Enum):
    """Iterations of a write that need a signal."""

    ALWAYS = "always"
    BY_OTHERS = "where another rank owns the copy"
    NEVER = "never"


def _awaited_granules(counter: Counter) -> np.ndarray | None:
    """Return a mask of the granules of each copy that some rank may wait for; None: all of them."""
    accesses = counter.accesses
    if counter.at_exit or counter.also_at_exit or counter.by_copies:
        return None
    if accesses.is_ragged or accesses.announces:
        return None
    awaited = np.zeros(counter.arrivals.shape, np.bool_)
    for footprints in counter.users:
        numbers = counter.granules.numbers_of(footprints)
        awaited[tuple(footprints.distinct(footprints.owner, numbers))] = True
    return awaited


def _need_of(counter: Counter, footprints: Footprints, awaited: np.ndarray | None) -> _Need:
    """Return the iterations of a write that need a signal; all if no simple condition says it."""
    if awaited is None:
        return _Need.ALWAYS
    numbers = counter.granules.numbers_of(footprints)
    rank, owner, number = footprints.distinct(footprints.rank, footprints.owner, numbers)
    needed = awaited[owner, number]
    if needed.all():
        return _Need.ALWAYS
    if not needed.any():
        return _Need.NEVER
    return _Need.BY_OTHERS if np.array_equal(needed, owner != rank) else _Need.ALWAYS


@dataclass
class _Signal:
    """Signal of one access, or of several.

    Attributes:
        accesses: footprints of the accesses that the signal publishes.
        anchor: statement that the signal follows.
        exited: loops around the first access that the signal was moved out of.
        owner, granule: owner and number of the counter.
        counter: both without bound variables, to compare the counters of two signals.
        value: units that the signal adds.
        is_guarded: whether the signal has conditions of its own.
        need: the iterations that need it.
    """

    accesses: list[Footprints]
    anchor: tirx.Stmt
    exited: Sequence[Loop]
    owner: tirx.PrimExpr
    granule: tirx.PrimExpr
    counter: list[tirx.PrimExpr]
    value: tirx.PrimExpr
    is_guarded: bool
    need: _Need

    def has_counter_of(self, other: _Signal) -> bool:
        """Return whether both signals follow the same statement and always change one counter."""
        return (
            self.anchor.same_as(other.anchor)
            and not self.is_guarded
            and not other.is_guarded
            and self.need is other.need
            and self.accesses[0].ranks_and_owners() == other.accesses[0].ranks_and_owners()
            and structural_equal(self.counter, other.counter)
        )


def _add(signals: list[_Signal], signal: _Signal) -> None:
    """Append ``signal``, or add its units to a signal of the same counter."""
    for other in signals:
        if other.has_counter_of(signal):
            other.accesses += signal.accesses
            other.value = tvm.arith.Analyzer().simplify(other.value + signal.value)
            return
    signals.append(signal)


def signal_depth(context: SyncContext, counter: Counter, footprints: Footprints) -> int:
    """Count the loops around the access that enclose its signal."""
    access = footprints.access
    numbers = [footprints.owner, counter.granules.numbers_of(footprints)]
    if access.stored:
        depth = enclosing_depth(access, footprints, numbers)
    else:
        depth = enclosing_depth(access, footprints, numbers, clipped=True)
        if _pieces(counter, footprints, depth) is None:
            depth = enclosing_depth(access, footprints, [*numbers, elements_of(footprints)])
    while depth < len(access.loops) and (
        _waits_in(context, access.loops[depth])
        or not may_leave_loop(context, counter, footprints, depth, first=depth)
    ):
        depth += 1
    return depth


def _pieces(counter: Counter, footprints: Footprints, depth: int) -> dict[int, int] | None:
    """Find the loop whose iterations write different numbers of elements, or nothing, because the
    tensor ends there. Only loops inside the outer ``depth`` ones are considered.

    Returns:
        The index of the loop, by the axis (after the rank's) along which its iterations write
        consecutive pieces. Empty if all iterations write equally many elements. None if several
        loops are uneven, or the pieces are not consecutive.
    """
    counts = elements_of(footprints)
    uneven = [
        number
        for number in range(depth, len(footprints.access.loops))
        if varies(counts, 1 + number, footprints.mask) or varies(footprints.mask, 1 + number)
    ]
    if not uneven:
        return {}
    number, *others = uneven
    axes = [a for a, low in enumerate(footprints.low) if low.shape[1 + number] > 1]
    if others or len(axes) != 1:
        return None
    (axis,) = axes
    low, size, mask, along = (
        footprints.low[axis],
        footprints.size[axis],
        footprints.mask,
        1 + number,
    )
    piece_size, end = int(footprints.active(size)[0].max()), counter.granules.shape[axis]
    iterations = np.arange(low.shape[along]).reshape(-1, *[1] * (low.ndim - along - 1))
    begins = np.take(low, [0], axis=along) + iterations * piece_size
    touched = np.take(mask, [0], axis=along) & (begins < end)
    is_piece = (low == begins) & (size == np.minimum(piece_size, end - begins))
    is_consecutive = np.all(mask == touched) and np.all(is_piece | ~mask)
    return {axis: number} if is_consecutive else None


def _waits_in(context: SyncContext, loop: Loop) -> bool:
    return any(loop in f.access.loops for counter in context.counters for f in counter.users)


def _signal(context: SyncContext, counter: Counter, footprints: Footprints, need: _Need) -> _Signal:
    """Return the signal of an access."""
    access, symbols = footprints.access, context.symbols
    depth = signal_depth(context, counter, footprints)
    exited = access.loops[depth:]

    loops = [*exited, *access.inner]
    owner = symbols.inserted(symbols.box_start(footprints, 0, loops), access)
    granule = counter.granules.index(footprints, symbols, exited)
    key = [symbols.without_bindings(expr, access) for expr in (owner, granule)]
    if access.stored:
        value = _rows_count(counter, footprints, symbols, exited)
    else:
        value = _count(counter, footprints, symbols, exited)
    if isinstance(value, tirx.IntImm):
        value = tirx.const(int(value), "uint32")
    else:  # not simplified: the form would depend on the sizes
        value = tirx.Cast("uint32", value)
    unguarded = tirx.Evaluate(tirx.IntImm("int32", 0))
    is_guarded = not context.guard(unguarded, footprints, exited).same_as(unguarded)
    anchor = anchor_of(access, depth)
    return _Signal([footprints], anchor, exited, owner, granule, key, value, is_guarded, need)


def _place(context: SyncContext, counter: Counter, signal: _Signal) -> None:
    """Insert a signal after its anchor, and record why."""
    footprints, *others = signal.accesses
    access = footprints.access
    stmt = context.signal_to(counter, footprints, signal.owner, signal.granule, signal.value)
    if signal.need is _Need.BY_OTHERS:
        is_other = tirx.NE(signal.owner, context.symbols.rank_call)
        stmt = tirx.IfThenElse(context.symbols.inserted(is_other, access), stmt, None)
    stmt = context.guard(stmt, footprints, signal.exited)
    context.placement.put_after(signal.anchor, stmt, access)
    reason = f"{_reason(context, counter, access)}{moved_out_of(signal.exited)}"
    context.record_counter_op("signal", access, counter, reason, stmt, signal.value)
    for other in others:
        covered = f"the signal at {access.line} covers it, too"
        context.record("signal", other.access, counter.accesses.tensor.name, covered)


def _reason(context: SyncContext, counter: Counter, access: Access) -> str:
    verb = "adds to" if access.kind == "add" else "writes"
    reader = "the owner, which waits at the end" if counter.at_exit else "its owner"
    reader = "the copy that reads it" if counter.by_copies else reader
    all_ranks = (1 << context.world_size) - 1
    if counter.pulled:
        all_read = all(bits | 1 << owner == all_ranks for owner, bits in enumerate(counter.waiting))
        reader = "every rank" if all_read else "the ranks that read it"
    return f"{access.op} {verb} it for {reader}"


def _rows_count(
    counter: Counter, footprints: Footprints, symbols: Symbols, exited: Sequence[Loop]
) -> tirx.PrimExpr:
    """Return the units of rows that a write stores in all iterations of ``exited``."""
    count: tirx.PrimExpr = tirx.IntImm("int32", footprints.access.stored // counter.unit)
    for number, loop in enumerate(exited, len(footprints.access.loops) - len(exited)):
        if number in footprints.runtime_loops:
            count = count * tirx.max(footprints.runtime_loops[number], 0)
        else:
            count = count * symbols.program.inline_bindings(loop.extent)
    return count


def _count(
    counter: Counter, footprints: Footprints, symbols: Symbols, exited: Sequence[Loop]
) -> tirx.PrimExpr:
    """Return the units that an access writes in all iterations of ``exited``, as an expression. If
    programs of other sizes may share the kernel, it has one form, whether tiles end with the tensor
    or not."""
    loops, inline = footprints.access.loops, symbols.program.inline_bindings
    depth = len(loops) - len(exited)
    pieces = _pieces(counter, footprints, depth) or {}
    counts = footprints.flat(elements_of(footprints))[-1]
    count: tirx.PrimExpr = tirx.IntImm("int32", 1)
    if np.ptp(counts) == 0 and not pieces and not symbols.program.is_shared:
        count = tirx.IntImm("int32", int(counts[0]) // counter.unit)
    else:
        for axis in range(len(footprints.low)):
            iterations = inline(loops[pieces[axis]].extent) if axis in pieces else None
            count = count * _extent(counter, footprints, axis, symbols, exited, iterations)
        count = quotient(count, counter.unit)
    for number in range(depth, len(loops)):
        if number not in pieces.values():
            count = count * inline(loops[number].extent)
    return count


def _extent(
    counter: Counter, footprints: Footprints, axis: int, symbols: Symbols, exited: Sequence[Loop],
    iterations: tirx.PrimExpr | None,
) -> tirx.PrimExpr:  # fmt: skip
    """Return the extent of an access along ``axis`` (after the rank's), as an expression; for its
    form see ``_count``.

    Args:
        iterations: number of iterations that access consecutive pieces; None for one access.

    Raises:
        LanguageError: the extent varies for another reason than the end of the tensor.
    """
    access, loops = footprints.access, [*exited, *footprints.access.inner]
    low, size = footprints.active(footprints.low[axis], footprints.size[axis])
    max_size, end = int(size.max()), int((low + size).max())
    inline = symbols.program.inline_bindings
    if iterations is not None:
        full_extent, end = max_size * iterations, counter.granules.shape[axis]
    elif np.ptp(size) == 0 and (not symbols.program.is_shared or _is_index(access, axis, inline)):
        return tirx.IntImm("int32", max_size)
    elif np.array_equal(size, np.minimum(max_size, end - low)):
        full_extent = tirx.IntImm("int32", max_size)
    elif np.ptp(size) == 0:
        return tirx.IntImm("int32", max_size)
    elif not access.inner:
        full_extent = symbols.in_first_iteration(access.extents[1 + axis], loops)
        end = counter.granules.shape[axis]
    else:
        raise footprints.refused(
            f"touches {int(size.min())} to {max_size} elements along an axis",
            "an equal number each time, or fewer only before an end that no access crosses",
        )
    return tirx.min(full_extent, end - symbols.box_start(footprints, 1 + axis, loops))


def _is_index(access: Access, axis: int, inline: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> bool:
    """Return whether an access has one index along ``axis`` (after the rank's) for all sizes."""
    start, extent = (inline(exprs[1 + axis]) for exprs in (access.starts, access.extents))
    inner = {loop.var for loop in access.inner}
    is_one = isinstance(extent, tirx.IntImm) and int(extent) == 1
    return is_one and inner.isdisjoint(variables_in(start))
