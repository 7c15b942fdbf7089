"""Waits before accesses that need data of other blocks or ranks."""

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
from ..regions.data_dependent import is_invariant
from ..regions.footprints import Footprints
from ..regions.granules import Counter
from ..regions.space import Loop
from ..regions.symbols import quotient, remainder
from . import builtin_calls
from .context import SyncContext, by_rank
from .edits import anchor_of, enclosing_depth, moved_out_of


def place_waits(context: SyncContext) -> None:
    """Insert a wait before each access that needs data of other blocks or ranks.

    - The wait is moved out of loops in which the granule does not change, unless these loops signal
      to other blocks: the data could depend on those signals.
    - Outside a loop that may run zero times, it is guarded by the extent of the loop. Outside
      branches of the block, it is guarded by their conditions.
    - No wait is inserted if an earlier wait of the same block for the same granule dominates it.

    Before: ``T.copy(S[me, row, 0], tile)``
    After:  ``T.tileweave.wait_reached(S_arrived[me, row // 128], epoch * 3);
    T.copy(S[me, row, 0], tile)``
    """
    for counter in context.signalled_counters:
        placed: list[tuple[list[tirx.PrimExpr], Access, int]] = []
        for footprints in counter.users:
            _wait(context, counter, footprints, placed)


def wait_depth(context: SyncContext, counter: Counter, footprints: Footprints) -> int:
    """Count the loops around the access that enclose its wait."""
    access = footprints.access
    values = [footprints.owner, counter.granules.numbers_of(footprints)]
    depth = enclosing_depth(access, footprints, values, guarded=True)
    while depth < len(access.loops) and (
        _signals_in(context, access.loops[depth])
        or not may_leave_loop(context, counter, footprints, depth, first=depth + 1)
    ):
        depth += 1
    return depth


def may_leave_loop(
    context: SyncContext, counter: Counter, footprints: Footprints, number: int, first: int
) -> bool:
    """Return whether the data-dependent expressions of a wait or signal have the same value before
    and after the loop of this number around its access.

    Args:
        first: number of the first loop whose extent is one of these expressions.
    """
    loop = footprints.access.enclosing[number].stmt
    assert loop is not None
    extents = [extent for other, extent in footprints.runtime_loops.items() if other >= first]
    exprs = [*runtime_indices(counter, footprints), *extents]
    return all(is_invariant(loop, expr, context.program) for expr in exprs)


def runtime_indices(counter: Counter, footprints: Footprints) -> list[tirx.PrimExpr]:
    """Return the data-dependent indices that choose the counter of a wait."""
    counts = (counter.accesses.world_size, *counter.granules.counts)
    return [index for axis, index in footprints.runtime_axes.items() if counts[axis] > 1]


def _signals_in(context: SyncContext, loop: Loop) -> bool:
    return any(
        loop in footprints.access.loops
        for counter in context.counters
        for footprints in counter.accesses.in_kernel(counter.kind)
    )


def _wait(context: SyncContext, counter: Counter, footprints: Footprints, placed: list) -> None:
    access, symbols, name = footprints.access, context.symbols, counter.accesses.tensor.name
    depth = wait_depth(context, counter, footprints)
    exited = access.loops[depth:]
    loops = [*exited, *access.inner]
    owner = symbols.inserted(symbols.box_start(footprints, 0, loops), access)
    granule = counter.granules.index(footprints, symbols, exited)
    key = [symbols.without_bindings(expr, access) for expr in (owner, granule)]
    for other_key, other, other_depth in placed:
        if structural_equal(key, other_key) and dominates(other, other_depth, access, depth):
            context.record("wait", access, name, f"the wait at {other.line} covers it, too")
            return
    extents = [
        footprints.runtime_loops[number] if number in footprints.runtime_loops
        else symbols.in_first_iteration(loop.extent, exited)
        for number, loop in enumerate(exited, depth)
        if number in footprints.runtime_loops or number in footprints.skipped
    ]  # fmt: skip
    is_fixed = not any(has_loads(index) for index in runtime_indices(counter, footprints))
    if is_fixed and not footprints.outside and not footprints.inner_conditions and not extents:
        placed.append((key, access, depth))
    if counter.accesses.is_ragged:
        arrivals = tirx.Var("announced", "uint32")  # for explain
        target = _announced_total(context, counter, footprints, loops)
    else:
        arrivals = _arrivals(counter, footprints, owner, granule, context.program.is_shared)
        epochs = context.epochs_of(counter.accesses.tensor)
        target = arrivals if counter.accesses.is_limited else epochs * arrivals
    flag = context.flag(counter, symbols.rank_call, owner, granule)
    peer = tirx.IntImm("int32", -1)
    stmt = builtin_calls.wait_reached(flag, target, peer, access, counter.scope)
    num_outer = access.enclosing[depth].num_outer_conditions if exited else len(access.conditions)
    inner_conditions = access.conditions[num_outer:]
    conditions = [symbols.in_first_iteration(condition, exited) for condition in inner_conditions]
    if _reads_own(counter, footprints):
        conditions.append(tirx.NE(tirx.floordiv(granule, counter.own), symbols.rank_call))
    if conditions:
        holds = symbols.inserted(functools.reduce(tirx.And, conditions), access)
        stmt = tirx.IfThenElse(holds, stmt, None)
    stmt = context.guard(stmt, footprints, exited)
    for extent in extents:
        runs = tirx.GT(extent, 0)
        stmt = tirx.IfThenElse(symbols.inserted(runs, access), stmt, None)
    context.placement.put_before(anchor_of(access, depth), stmt, access)
    reason = f"{access.op} {_needs(counter, footprints)}{moved_out_of(exited)}"
    context.record_counter_op("wait", access, counter, reason, stmt, arrivals)


def _announced_total(
    context: SyncContext, counter: Counter, footprints: Footprints, loops: Sequence[Loop]
) -> tirx.PrimExpr:
    """Return the elements that the source of a tile of rows has announced so far, as an
    expression."""
    counts = counter.accesses.counts
    assert counts is not None
    owner, *segment, row = (
        context.symbols.box_start(footprints, axis, loops) for axis in range(2 + counts.segments)
    )
    is_segment = counter.granules.counts[counts.segments] == 1
    word = tirx.IntImm("int32", 1) if is_segment else 1 + tirx.floordiv(row, counter.accesses.tile)
    owner, *segment = (
        context.symbols.inserted(index, footprints.access) for index in (owner, *segment, word)
    )
    index = [owner, *context.buffer_index(counts.tensor), *segment]
    return tirx.BufferLoad(context.all_buffers_of(counts.tensor), index)


def _needs(counter: Counter, footprints: Footprints) -> str:
    producers = "additions" if counter.kind == "add" else "writes"
    needs = {
        "read": f"reads the result of {producers}",
        "add": "adds to memory that must have been cleared",
    }[footprints.access.kind]
    return needs if footprints.is_certain else f"{needs}; which part depends on data"


def _reads_own(counter: Counter, footprints: Footprints) -> bool:
    """Return whether some ranks read their own share, which arrives before the kernel starts."""
    if not counter.own:
        return False
    rank, granule = footprints.distinct(footprints.rank, counter.granules.numbers_of(footprints))
    return bool(np.any(granule // counter.own == rank))


def dominates(first: Access, first_depth: int, second: Access, second_depth: int) -> bool:
    """Return whether a wait before ``first`` always precedes a wait before ``second`` in the same
    iteration.

    Args:
        first_depth, second_depth: number of loops around the access that enclose its wait.
    """
    if first_depth > second_depth or first.positions > second.positions:
        return False
    loops = all(
        a.var.same_as(b.var)
        for a, b in zip(first.loops[:first_depth], second.loops[:first_depth], strict=True)
    )
    return (
        loops
        and len(second.conditions) >= len(first.conditions)
        and all(a.same_as(b) for a, b in zip(first.conditions, second.conditions, strict=False))
    )


def _arrivals(
    counter: Counter, footprints: Footprints, owner: tirx.PrimExpr, granule: tirx.PrimExpr,
    is_shared: bool,
) -> tirx.PrimExpr:  # fmt: skip
    """Return the units that arrive in the granule in each launch, as an expression.

    Args:
        is_shared: whether programs of other sizes may share the kernel. The expression then has one
            form, whether granules end with the tensor or not.

    Raises:
        LanguageError: granules receive different numbers of elements.
    """
    arrivals, granules = counter.arrivals, counter.granules
    owners, number = footprints.distinct(footprints.owner, granules.numbers_of(footprints))
    units = arrivals[owners, number]
    values = np.unique(units)
    ends = _ends(counter)
    elements = volumes(granules.shape, granules.size, ends).ravel()[number]
    times = np.unique(units * counter.unit // np.maximum(elements, 1))
    is_whole = len(times) == 1 and np.array_equal(units * counter.unit, elements * times[0])
    if is_shared and is_whole:
        return _clipped(counter, granule, int(times[0]), ends, is_shared)
    if len(values) == 1:
        return tirx.const(int(values[0]), "uint32")
    by_owner = [np.unique(units[owners == r]) for r in range(len(arrivals))]
    if all(len(v) <= 1 for v in by_owner):
        return by_rank(owner, [int(v[0]) if len(v) else 0 for v in by_owner])
    if is_whole:
        return _clipped(counter, granule, int(times[0]), ends, is_shared)
    raise LanguageError(
        f"{footprints.access.text}: {_unequal(counter, owners, number, units)}, or explicit "
        f"signals and waits{footprints.access.location}"
    )


def _unequal(counter: Counter, owners: np.ndarray, number: np.ndarray, units: np.ndarray) -> str:
    """Name two granules that receive different numbers of elements, and what is expected."""
    least, most = int(units.argmin()), int(units.argmax())
    granule, other = (_granule_text(counter, int(owners[n]), int(number[n])) for n in (least, most))
    received, elements = int(units[least]) * counter.unit, int(units[most]) * counter.unit
    if counter.kind == "add" and not received:
        return (
            f"{other} receives {elements} added elements in a launch, {granule} is only written; "
            "expected additions to both, another tensor for what is only written"
        )
    return (
        f"{other} receives {elements} elements in a launch, {granule} {received}; expected an "
        f"equal number in each granule of {counter.granules.text} elements that it reads, each "
        "written whole, another tileweave.granule"
    )


def _granule_text(counter: Counter, owner: int, number: int) -> str:
    """Format a granule: ``S[1, 2, 0:64]``."""
    granules, axes = counter.granules, [str(owner)]
    index = np.unravel_index(number, granules.counts)
    for i, size, extent in zip(index, granules.size, granules.shape, strict=True):
        low = int(i) * size
        axes.append(str(low) if size == 1 else f"{low}:{min(low + size, extent)}")
    return f"{counter.accesses.tensor.name}[{', '.join(axes)}]"


def _ends(counter: Counter) -> tuple[int, ...]:
    """Return the end of the arriving data along each axis."""
    bounds = [footprints.bounds for footprints in counter.accesses.of_kind(counter.kind)]
    axes = zip(*bounds, strict=True)
    return tuple(max(int(high.max(initial=0)) for _, high in axis) for axis in axes)


def _clipped(
    counter: Counter, granule: tirx.PrimExpr, times: int, ends: Sequence[int], is_shared: bool
) -> tirx.PrimExpr:
    """Return the units that arrive in a granule if nothing arrives after ``ends``.

    Args:
        times: how many times each element arrives.
        is_shared: as in ``_arrivals``.
    """
    elements: tirx.PrimExpr = tirx.IntImm("int32", times)
    number = granule
    granules = counter.granules
    for count, size, extent in reversed(
        list(zip(granules.counts, granules.size, ends, strict=True))
    ):
        is_clipped = extent < count * size or (is_shared and size > 1)
        start = remainder(number, count) * size
        elements = elements * (tirx.min(size, extent - start) if is_clipped else size)
        number = quotient(number, count)
    return tirx.Cast("uint32", quotient(elements, counter.unit))
