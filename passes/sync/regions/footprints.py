"""Footprints: the boxes that an access touches in all its iterations, as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ....builtins.errors import LanguageError
from ...ir.walk import format_expr
from .accesses import Access, Program
from .data_dependent import Limit, Region, limited_region, possible_region
from .space import IterationSpace, NotEvaluable

_MAX_INTEGERS = 1 << 28
"""Limit of the integers held at a time for the iterations of one access on all ranks: 2 GiB."""
_MAX_TABLE_ENTRIES = 1 << 25
"""Limit of the table entries with which distinct combinations are found."""
_TRUE = np.ones((), np.bool_)
_EXPECTED = "explicit signals and waits"


@dataclass(frozen=True, eq=False)
class Footprints:
    """The boxes of one access in all its iterations.

    The arrays broadcast against each other. They have one axis for the rank and one for each loop
    around the access. For a data-dependent read, the last axes extend over all possible places.

    Attributes:
        access: the access that touches the boxes.
        rank: the rank that runs the iteration.
        owner: the rank whose copy contains the box.
        low, size: first element and extent of the box on each axis after the rank axis, clipped to
            the tensor.
        mask: iterations in which the access happens and touches at least one element.
        block: number of the block that runs the iteration, in launch order.
        repeats: number of iterations that touch exactly the same boxes.
        outside: axes after the rank axis on which some boxes are completely past the end.
        before: axes after the rank axis on which some boxes begin before the first element.
        misses: whether some boxes are certainly completely outside of the tensor.
        skipped: numbers of the loops around the access that sometimes have no iteration.
        runtime_axes, runtime_loops, is_certain, limit: see ``Region``.
        limited: ``limit.index`` in each iteration; 0 without a limit.
        iterations: for each axis of a loop of which the arrays have some iterations only, a mask of
            these; in the others the access never happens.
        inner_conditions: conditions inside ``access.anchor`` that decide whether the access
            happens, evaluated in one iteration of ``access.inner`` in which they hold if they hold
            in any. Empty if the access happens whenever the block reaches the anchor, unless
            programs of other sizes may share the kernel.
        shifts: for each axis (0 is the rank axis), the distance from the place of the first
            iteration of ``access.inner`` to the start of the box. It is not 0 if a condition skips
            first iterations, and None if it varies.
    """

    access: Access
    rank: np.ndarray
    owner: np.ndarray
    low: tuple[np.ndarray, ...]
    size: tuple[np.ndarray, ...]
    mask: np.ndarray
    block: np.ndarray
    repeats: int
    outside: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    misses: bool = False
    skipped: tuple[int, ...] = ()
    runtime_axes: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    runtime_loops: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    is_certain: bool = True
    inner_conditions: tuple[tirx.PrimExpr, ...] = ()
    shifts: tuple[int | None, ...] = ()
    limit: Limit | None = None
    limited: np.ndarray = field(default_factory=lambda: np.zeros((), np.int64))
    iterations: Mapping[int, np.ndarray] = field(default_factory=dict)

    def without_idle(self, grid: int) -> Footprints:
        """Return the footprints without iterations of loops in which the access never happens.

        The first iteration stays, and so do all if the access happens in the first one: statements
        move out of a loop by what they do in it.

        Args:
            grid: number of block axes, whose blocks all stay.
        """
        mask, iterations = self.mask, {}
        for axis in range(1 + grid, 1 + len(self.access.loops)):
            happens = mask.any(axis=tuple(a for a in range(mask.ndim) if a != axis))
            if not happens[0] and 2 * happens.sum() < happens.size:
                happens[0] = True
                iterations[axis] = happens
        if not iterations:
            return self
        shorter = replace(self, iterations=iterations)
        return replace(
            shorter, owner=shorter.taken(self.owner), low=tuple(map(shorter.taken, self.low)),
            size=tuple(map(shorter.taken, self.size)), mask=shorter.taken(mask),
            limited=shorter.taken(self.limited),
        )  # fmt: skip

    def taken(self, values: np.ndarray) -> np.ndarray:
        """Return ``values`` of all iterations in those that the arrays have."""
        for axis, numbers in self.iterations.items():
            if values.ndim > axis and values.shape[axis] > 1:
                values = values.compress(numbers, axis=axis)
        return values

    def extended(self, values: np.ndarray) -> np.ndarray:
        """Return ``values`` in all iterations, 0 in those that the arrays do not have."""
        for axis, numbers in self.iterations.items():
            if values.ndim > axis:
                shape = (*values.shape[:axis], len(numbers), *values.shape[axis + 1 :])
                whole = np.zeros(shape, values.dtype)
                np.moveaxis(whole, axis, 0)[numbers] = np.moveaxis(values, axis, 0)
                values = whole
        return values

    def shift(self, axis: int) -> int:
        """Return the shift along ``axis``; see ``shifts``.

        Raises:
            LanguageError: the shift varies between iterations.
        """
        shift = self.shifts[axis] if self.shifts else 0
        if shift is None:
            raise self.refused(
                "skips first iterations of a loop, and their number varies",
                "a condition that always skips the same iterations",
            )
        return shift

    def refused(self, problem: str, expected: str) -> LanguageError:
        """Return the error for an access that cannot be analyzed because of ``problem``."""
        return _refused(self.access, problem, expected)

    def flat(self, *extra: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return flat arrays ``rank, owner, low..., high..., *more`` of the active iterations."""
        rank, owner, *columns = self.active(self.rank, self.owner, *self.low, *self.size, *extra)
        return rank, owner, *self._with_ends(columns)

    def active(self, *values: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Return flat arrays of ``values`` in the iterations in which the access happens, or in
        those of ``mask``.

        The arrays have no entries for an axis along which neither the values nor the mask vary.

        Raises:
            LanguageError: there are too many values to hold in memory.
        """
        mask = self.mask if mask is None else mask
        count = math.prod(np.broadcast_shapes(mask.shape, *(v.shape for v in values)))
        if count * len(values) > _MAX_INTEGERS:
            raise self.refused(
                f"happens {count} times on all ranks in a launch, which is too much to infer from",
                "smaller sizes, larger tiles",
            )
        return _active(mask, values)

    def distinct(self, *values: np.ndarray) -> list[np.ndarray]:
        """Return the combinations of ``values`` in active iterations; see ``combinations``."""
        return combinations(values, self.mask)

    @cached_property
    def unique_boxes(self) -> tuple[np.ndarray, ...]:
        """Flat arrays ``rank, owner, low..., high...`` of the boxes, once for each rank."""
        rank, owner, *columns = self.distinct(self.rank, self.owner, *self.low, *self.size)
        return rank, owner, *self._with_ends(columns)

    def _with_ends(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Convert ``low..., size..., more...`` to ``low..., high..., more...``."""
        axes = len(self.low)
        low, size, extra = arrays[:axes], arrays[axes : 2 * axes], arrays[2 * axes :]
        return [*low, *(a + n for a, n in zip(low, size, strict=True)), *extra]

    @cached_property
    def bounds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Flat arrays ``low, high`` of the ranges that occur, for each axis after the rank axis."""
        ranges = [self.distinct(*pair) for pair in zip(self.low, self.size, strict=True)]
        return [(low, low + size) for low, size in ranges]

    def ranks_and_owners(self) -> set[tuple[int, int]]:
        """Return the pairs (rank, owner of a copy that the rank accesses)."""
        rank, owner = self.distinct(self.rank, self.owner)
        return set(zip(rank.tolist(), owner.tolist(), strict=True))


def combinations(fields: Sequence[np.ndarray], mask: np.ndarray) -> list[np.ndarray]:
    """Return flat arrays of the combinations of ``fields`` that occur where ``mask`` holds.

    Each combination is listed once if a table of all possible ones is small enough. Fields that
    vary along no common axis are independent: all their combinations occur.
    """
    columns_of: dict[int, np.ndarray] = {}
    length = 1
    for numbers in _dependent_groups([mask, *fields]):
        with_mask = numbers[0] == 0
        numbers = numbers[with_mask:]
        if numbers:
            columns = _unique_rows([fields[n - 1] for n in numbers], mask if with_mask else _TRUE)
            count = len(columns[0])
        else:
            columns, count = (), int(mask.any())
        columns_of = {n: np.repeat(column, count) for n, column in columns_of.items()}
        columns_of |= {n: np.tile(c, length) for n, c in zip(numbers, columns, strict=True)}
        length *= count
    return [columns_of[n] for n in sorted(columns_of)]


def _dependent_groups(
    arrays: Sequence[np.ndarray], along: Sequence[int] | None = None
) -> list[list[int]]:
    """Group the numbers of arrays that are connected by axes along which both of two arrays vary.

    Args:
        along: consider only these axes.
    """
    # Axes are counted from the last one, because arrays may have different numbers of axes.
    groups: list[tuple[set[int], list[int]]] = []
    for number, array in enumerate(arrays):
        axes = {a - array.ndim for a, n in enumerate(array.shape) if n != 1}
        if along is not None:
            axes &= {a - array.ndim for a in along}
        numbers = [number]
        for group in [g for g in groups if g[0] & axes]:
            groups.remove(group)
            axes, numbers = axes | group[0], group[1] + numbers
        groups.append((axes, sorted(numbers)))
    return [numbers for _, numbers in groups]


def _active(mask: np.ndarray, values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    mask, *arrays = np.broadcast_arrays(mask, *values)
    if mask.all():
        return tuple(a.ravel() for a in arrays)
    return tuple(a[mask] for a in arrays)


def _unique_rows(fields: Sequence[np.ndarray], mask: np.ndarray) -> Sequence[np.ndarray]:
    """Return the combinations of ``fields`` where ``mask`` holds, each once.

    They are marked in a table, which takes a tenth of the time of sorting. Combinations may repeat
    if a value is negative or the table would be too large.
    """
    if any(a.min(initial=0) < 0 for a in fields):
        return _active(mask, fields)
    units = [int(np.gcd.reduce(a, axis=None)) or 1 for a in fields]
    radix = [int(a.max(initial=0)) // u + 1 for a, u in zip(fields, units, strict=True)]
    if math.prod(radix) > _MAX_TABLE_ENTRIES:
        return _active(mask, fields)
    code = np.int64(0)
    for field_, unit, n in zip(fields, units, radix, strict=True):
        code = code * n + field_ // unit
    occurs = np.zeros(math.prod(radix), np.bool_)
    occurs[_active(mask, [np.asarray(code)])] = True
    quotient, columns = np.flatnonzero(occurs), []
    for n, unit in zip(reversed(radix), reversed(units), strict=True):
        quotient, digit = np.divmod(quotient, n)
        columns.insert(0, digit * unit)
    return columns


def access_footprints(access: Access, program: Program, world_size: int) -> Footprints:
    """Return the boxes of ``access`` on all ranks; for a data-dependent read, all possible boxes.

    Raises:
        LanguageError: the place or the condition of the access is known only at run time, or the
            touched elements do not form a box.
    """
    if access.unknown_count:
        raise _refused(access, f"repeats while {access.unknown_count} holds", "a loop over a range")
    whole = Region(access.starts, access.extents, access.conditions)
    try:
        return region_footprints(access, whole, program, world_size)
    except NotEvaluable as error:
        unknown = error
    try:
        may_be_limited = access.kind != "add" and not access.stored
        region = limited_region(access, program, world_size) if may_be_limited else None
        if region is not None:
            return region_footprints(access, region, program, world_size)
        if access.kind == "read" or access.stored:
            region = possible_region(access, program, world_size)
            return region_footprints(access, region, program, world_size)
    except NotEvaluable as error:
        unknown = error
    raise _refused(
        access,
        f"depends on {format_expr(unknown.node)}, which is known only at run time",
        "indices and conditions made of the rank, block indices and loops"
        f"{_dynamic_instead(access, program)}",
    )


def _dynamic_instead(access: Access, program: Program) -> str:
    """Return a hint that names ``T.dynamic`` for the scalar parameters that an access depends on.

    Dynamic extents become constants before the inference; scalar parameters do not.
    """
    func = program.func
    assert func is not None
    scalars = [p for p in func.params if p not in func.buffer_map]
    exprs: list[tirx.PrimExpr] = [*access.starts, *access.extents, *access.conditions]
    for loop in (*program.grid, *access.loops, *access.inner):
        exprs += [loop.min, loop.extent]
    used = program.dependencies(exprs)
    names = [p.name for p in scalars if p in used]
    if not names:
        return ""
    sizes = ", ".join(f"T.dynamic({name!r})" for name in names)
    return f", or {sizes} as extents of tensors instead of scalar parameters"


def region_footprints(
    access: Access, region: Region, program: Program, world_size: int
) -> Footprints:
    """Return the boxes of ``region``, a part of ``access`` that can be evaluated, on all ranks.

    Raises:
        NotEvaluable: a part of it is known only at run time.
        LanguageError: the touched elements do not form a box.
    """
    outer, end = len(access.loops) + 1, len(access.loops) + 1 + len(access.inner)
    loops = [*access.loops, *access.inner, *region.places]
    space = IterationSpace(
        world_size, loops, program.values, allow_unknown_ranges=not region.is_certain
    )
    inner = tuple(range(outer, end))
    conditions = [space.evaluate(c).astype(np.bool_) for c in region.conditions]
    # The two masks stay separate, because their product would extend over the axes of both.
    outer_mask, mask = _split_mask([space.inside, *conditions], inner)
    skipped = tuple(n for n in range(len(access.loops)) if _skips(space.skipped[n], conditions))
    fixed, starts = zip(*(_split(space, s, inner) for s in region.starts), strict=True)
    extents = [space.evaluate(e) for e in region.extents]
    block = space.block_number(program.grid)
    limited = np.asarray(space.evaluate(region.limit.index if region.limit else 0))
    if any(limited.shape[axis] > 1 for axis in inner):
        raise NotEvaluable(region.limit.value)
    shape = [int(space.evaluate(e).max()) for e in access.tensor.shape]
    happens: np.ndarray = outer_mask & mask.any(axis=inner, keepdims=True)
    merged = merged_footprints(starts, extents, mask, inner, happens)
    if merged is None:
        raise _refused(access, "touches elements that do not fill a box", "a box without holes")
    low, size = [a + b for a, b in zip(fixed, merged[0], strict=True)], merged[1]
    _require_one_rank(access, low[0], size[0], happens)
    inner_conditions = _inner_conditions(
        access, region, program, space, (outer_mask, mask), happens
    )
    invalid = (low[0] < 0) | (low[0] >= world_size)
    if _overlap(invalid, happens):
        (ranks,) = _active(invalid & happens, [low[0]])
        raise LanguageError(
            f"{access.text}, which has rank index {ranks.min()}; expected 0 to {world_size - 1}"
            f"{access.location}"
        )
    owner = np.clip(low[0], 0, world_size - 1)
    if access.is_contiguous and any(
        _overlap(a + b > n, happens) for a, b, n in zip(low[1:], size[1:], shape[1:], strict=True)
    ):
        raise _refused(access, "extends past the end of a row", "part of a row, or whole rows")
    shifts = tuple(
        _common_value(*_active(happens, [a - _first(start, inner)]))
        for a, start in zip(merged[0], starts if inner else (), strict=bool(inner))
    )
    clipped = [
        _clipped(a, b, n, happens) for a, b, n in zip(low[1:], size[1:], shape[1:], strict=True)
    ]
    before = tuple(axis for axis, a in enumerate(low[1:]) if _overlap(a < 0, happens))
    out_of_bounds = [a >= n for a, n in zip(low[1:], shape[1:], strict=True)]
    outside = tuple(axis for axis, mask in enumerate(out_of_bounds) if _overlap(mask, happens))
    misses = bool(outside) or any(
        _overlap(a + b <= 0, happens) for a, b in zip(low[1:], size[1:], strict=True)
    )
    for axis in outside:
        happens = happens & ~out_of_bounds[axis]
    bounds = [a for c in clipped for a in c]
    varying = np.broadcast_shapes(
        space.rank.shape, happens.shape, owner.shape, *(a.shape for a in bounds)
    )
    repeats = math.prod(n for n, m in zip(space.shape[:outer], varying, strict=False) if m == 1)
    footprints = Footprints(
        access, space.rank, owner, tuple(c[0] for c in clipped),
        tuple(c[1] for c in clipped), happens, block, repeats,
        outside, before, misses and region.is_certain, skipped, region.runtime_axes,
        region.runtime_loops, region.is_certain, inner_conditions, shifts, region.limit, limited,
    )  # fmt: skip
    return footprints.without_idle(len(program.grid))


def _split(
    space: IterationSpace, expr: tirx.PrimExpr, axes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays whose sum is the value of ``expr`` in every iteration. The first one does
    not vary along ``axes``, the second one along few of the others."""
    expr = space.bound(expr)
    if isinstance(expr, tirx.Add | tirx.Sub):
        (a, inner_a), (b, inner_b) = (_split(space, e, axes) for e in (expr.a, expr.b))
        if isinstance(expr, tirx.Add):
            return a + b, inner_a + inner_b
        return a - b, inner_a - inner_b
    value, zero = space.evaluate(expr), space.evaluate(0)
    return (zero, value) if any(value.shape[a] > 1 for a in axes) else (value, zero)


def _inner_conditions(
    access: Access, region: Region, program: Program, space: IterationSpace,
    masks: tuple[np.ndarray, np.ndarray], happens: np.ndarray,
) -> tuple[tirx.PrimExpr, ...]:  # fmt: skip
    """Return ``Footprints.inner_conditions``.

    Args:
        masks: two masks of the iterations; the access happens where both hold.
    """
    branches = access.conditions[: access.branches]
    outer = [c for c in region.conditions if any(c.same_as(b) for b in branches)]
    inner = [c for c in region.conditions if not any(c.same_as(o) for o in outer)]
    if not inner:
        return ()
    axes = range(len(access.loops) + 1, len(access.loops) + 1 + len(access.inner))
    reached = np.logical_or.reduce(space.inside, axis=tuple(axes), keepdims=True)
    for condition in outer:
        reached = reached & space.evaluate(condition).astype(np.bool_)
    is_certain = not np.any(reached & ~happens)
    if is_certain and not program.is_shared:
        return ()
    mask = masks[0] & masks[1]
    counts = mask.sum(axis=tuple(a for a in range(mask.ndim) if a not in axes))
    # The only candidate is the iteration in which the conditions hold most often.
    candidate = np.unravel_index(np.argmax(counts), counts.shape)
    in_candidate = mask
    for axis, number in zip(axes, candidate, strict=True):
        in_candidate = np.take(in_candidate, [number], axis=axis)
    if np.all((in_candidate & reached) == happens):
        iteration = {
            loop.var: loop.min + int(number)
            for loop, number in zip(access.inner, candidate, strict=True)
        }
        return tuple(substitute(program.inline_bindings(c), iteration) for c in inner)
    if is_certain:
        return ()
    raise _refused(
        access,
        "skips all iterations of a loop where its conditions do not all hold in one of them",
        "conditions that hold in one fixed iteration whenever they hold in any",
    )


def _split_mask(
    conditions: Sequence[np.ndarray], axes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks: conditions that do not vary along ``axes``, and all other conditions."""
    true = np.ones_like(conditions[0], shape=(1,) * conditions[0].ndim)
    constant, varying = true, true
    for condition in conditions:
        if any(condition.shape[a] > 1 for a in axes):
            varying = varying & condition
        else:
            constant = constant & condition
    return constant, varying


def _skips(skipped: np.ndarray, conditions: Sequence[np.ndarray]) -> bool:
    """Return whether a loop has no iteration at a point where the conditions hold."""
    for condition in conditions if skipped.any() else ():
        skipped = skipped & condition
    return bool(np.any(skipped))


def _overlap(mask: np.ndarray, happens: np.ndarray) -> bool:
    """Return whether both masks hold at some point; avoid the broadcast if ``mask`` is empty."""
    return bool(mask.any()) and bool(np.any(mask & happens))


def _clipped(
    low: np.ndarray, size: np.ndarray, extent: int, happens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Clip boxes to an axis of ``extent`` elements; return their starts and sizes.

    Starts of boxes that do not happen are moved inside the axis. The arrays keep their shapes
    unless a box that happens extends past the axis.
    """
    high = low + size
    if _overlap((low < 0) | (high > extent), happens):
        low = np.maximum(low, 0)
        return low, np.clip(high, 0, extent) - low
    return np.clip(low, 0, max(extent - 1, 0)), size


def merged_footprints(starts, extents, mask, inner, happens):
    """Merge the boxes of all iterations along the axes ``inner`` where the mask holds.

    Return the starts and sizes of the merged boxes. Return None if a merged box that happens has
    elements that no iteration touches.
    """
    if not inner:
        return starts, extents
    fixed = [a for a in inner if all(v.shape[a] == 1 for v in (*starts, *extents))]
    mask = mask.any(axis=tuple(fixed), keepdims=True) if fixed else mask
    partial = any(mask.shape[a] > 1 for a in inner)
    low, size, volume = _bounding_boxes(starts, extents, mask if partial else None, inner)
    touched = np.int64(1)
    for extent in extents:
        touched = touched * extent.max(axis=inner, keepdims=True)
    groups = [[starts[n] for n in numbers] for numbers in _dependent_groups(starts, inner)]
    places = [_distinct_places(group, inner) for group in groups]
    shapes = [np.broadcast_shapes(*(s.shape for s in group)) for group in groups]
    iterations = [math.prod(shape[a] for a in inner) for shape in shapes]
    if not partial:
        for count in places:
            touched = touched * count
    elif all(np.all(count == n) for count, n in zip(places, iterations, strict=True)):
        shape = np.broadcast_shapes(*(s.shape for s in starts))
        unmasked = math.prod(shape[a] for a in inner if mask.shape[a] == 1)
        touched = touched * unmasked * mask.sum(axis=inner, keepdims=True)
    else:
        touched = touched * _distinct_places(starts, inner, mask)
    if _overlap(touched != volume, happens):
        return None
    return low, size


def _bounding_boxes(starts, extents, mask, inner):
    """Return starts, sizes and volumes of the smallest boxes over the axes ``inner``."""
    low, size, volume = [], [], np.int64(1)
    for start, extent in zip(starts, extents, strict=True):
        if mask is not None:
            big, end = np.int64(1) << 62, start + extent
            fixed = tuple(a for a in inner if end.shape[a] == 1)
            holds = mask.any(axis=fixed, keepdims=True)
            # Reduce first along axes of which the mask holds in all iterations, or in none.
            whole = tuple(a for a in inner if holds.shape[a] == 1)
            first, last = start.min(axis=whole, keepdims=True), end.max(axis=whole, keepdims=True)
            first = np.where(holds, first, big).min(axis=inner, keepdims=True)
            last = np.where(holds, last, -big).max(axis=inner, keepdims=True)
        else:
            first = start.min(axis=inner, keepdims=True)
            last = (start + extent).max(axis=inner, keepdims=True)
        low.append(first)
        size.append(last - first)
        volume = volume * size[-1]
    return low, size, volume


def _distinct_places(
    starts: Sequence[np.ndarray], inner: tuple[int, ...], mask: np.ndarray = _TRUE
) -> np.ndarray:
    """Return the number of distinct combinations of ``starts`` along the axes ``inner``.

    Several threads may touch the same place. Only iterations in which the mask holds count.
    """
    code = np.int64(0)
    for start in (_relative(s, inner) for s in starts):
        low, high = int(start.min(initial=0)), int(start.max(initial=0))
        code = code * (high - low + 1) + (start - low)
    code = np.where(mask, code, -1)
    code = np.moveaxis(code, inner, range(-len(inner), 0))
    code = np.sort(code.reshape(*code.shape[: code.ndim - len(inner)], -1))
    is_new = np.diff(code, prepend=-1) != 0
    return np.expand_dims(is_new.sum(axis=-1), inner)


def _relative(start: np.ndarray, inner: tuple[int, ...]) -> np.ndarray:
    """Return ``start`` relative to its value in the first iteration of the loops of ``inner``.

    An axis of another loop is reduced to extent 1 if the result does not depend on it.
    """
    distance = start - _first(start, inner)
    for axis in (a for a in range(distance.ndim) if a not in inner and distance.shape[a] > 1):
        first = np.take(distance, [0], axis=axis)
        distance = first if np.all(distance == first) else distance
    return distance


def _first(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return ``values`` in the first iteration of the loops of ``axes``."""
    for axis in axes:
        values = np.take(values, [0], axis=axis)
    return values


def _common_value(values: np.ndarray) -> int | None:
    """Return the value that all ``values`` have, 0 if there are none, or None if they differ."""
    if not values.size:
        return 0
    return int(values.flat[0]) if np.ptp(values) == 0 else None


def _require_one_rank(
    access: Access, first: np.ndarray, count: np.ndarray, happens: np.ndarray
) -> None:
    """Refuse an access to ``count`` copies from that of rank ``first`` on, unless it is one."""
    if not _overlap(count != 1, happens):
        return
    first, count = _active(happens, [first, count])
    several = int(count.argmax())
    raise _refused(
        access,
        f"accesses the copies of ranks {first[several]} to {first[several] + count[several] - 1} "
        "in one operation",
        "one rank in each (a T.serial loop over the ranks around it, instead of T.Parallel or "
        "a slice of the rank axis)",
    )


def _refused(access: Access, problem: str, expected: str) -> LanguageError:
    return LanguageError(
        f"{access.text}, which {problem}; expected {expected}, {_EXPECTED}, or W.unordered"
        f"{access.location}"
    )
