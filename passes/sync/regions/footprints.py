"""The boxes that an access touches, in all its iterations, as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from tvm import tirx
from tvm.tirx.stmt_functor import substitute

from ....builtins.errors import LanguageError
from ...ir.walk import format_expr, variables_in
from .accesses import Access, Program
from .data_dependent import Region, possible_region
from .space import NotEvaluable, Space
from .symbols import Symbols

_MOST_NUMBERS = 1 << 28
"""Numbers about the iterations of one access, of all ranks, that are held at a time: 2 GiB."""
_TABLE = 1 << 25
_TRUE = np.ones((), np.bool_)
_EXPECTED = "signals and waits written by hand"


@dataclass(frozen=True, eq=False)
class Footprints:
    """Arrays that broadcast against each other, an axis for the rank and each loop around it.

    Attributes:
        access: whose they are.
        rank: the rank that runs the iteration.
        home: in whose copy the box lies.
        low, size: where the box begins on each axis behind the rank's, and how far it goes;
            clipped to the tensor.
        mask: in which iterations it happens, and touches something.
        block: number of the block that runs it, in launch order.
        repeats: how many iterations do the very same.
        outside: axes behind the rank's on which some boxes lie wholly behind the end.
        before: axes behind the rank's on which some boxes begin before the first element.
        misses: whether some boxes surely lie wholly outside of the tensor.
        skipped: numbers of the loops around it that sometimes have no round.
        open_axes, open_loops, is_certain: of a read at a place that only the running kernel knows,
            see ``Region``: the last axes of the arrays are over all places.
        asked: conditions inside the statement that the whole block reaches, in a round of
            ``access.inner`` in which they hold if they do in any; none if they do in some round of
            each iteration.
        shifts: of each axis, the rank's first, how far behind the place of the first round of
            ``access.inner`` the box begins, as where a condition leaves rounds out; None where that
            differs.
    """

    access: Access
    rank: np.ndarray
    home: np.ndarray
    low: tuple[np.ndarray, ...]
    size: tuple[np.ndarray, ...]
    mask: np.ndarray
    block: np.ndarray
    repeats: int
    outside: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    misses: bool = False
    skipped: tuple[int, ...] = ()
    open_axes: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    open_loops: Mapping[int, tirx.PrimExpr] = field(default_factory=dict)
    is_certain: bool = True
    asked: tuple[tirx.PrimExpr, ...] = ()
    shifts: tuple[int | None, ...] = ()

    def shift(self, axis: int) -> int:
        """See ``shifts``.

        Raises:
            LanguageError: it differs.
        """
        found = self.shifts[axis] if self.shifts else 0
        if found is None:
            raise self.refused(
                "leaves out first rounds of a loop, not always as many",
                "a condition that leaves out the same ones",
            )
        return found

    def refused(self, what: str, expected: str) -> LanguageError:
        """What is raised where nothing can be said of the access, which does ``what``."""
        return _refused(self.access, what, expected)

    def flat(self, *more: np.ndarray) -> tuple[np.ndarray, ...]:
        """``rank, home, low..., high..., *more`` of the iterations in which it happens."""
        rank, home, *rest = self.where(self.rank, self.home, *self.low, *self.size, *more)
        return rank, home, *self._with_ends(rest)

    def where(self, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        """``values``, flat, of the iterations in which it happens; once for those that differ in
        none of them.

        Raises:
            LanguageError: there are too many to be held in memory.
        """
        count = math.prod(np.broadcast_shapes(self.mask.shape, *(v.shape for v in values)))
        if count * len(values) > _MOST_NUMBERS:
            raise self.refused(
                f"happens {count} times on all ranks in a launch, which is too much to infer from",
                "smaller sizes, larger tiles",
            )
        return _where(self.mask, values)

    def distinct(self, *values: np.ndarray) -> list[np.ndarray]:
        """The combinations of ``values``, flat, in the iterations in which it happens, each once
        where they are few enough to be marked in a table."""
        return combinations(values, self.mask)

    @cached_property
    def each(self) -> tuple[np.ndarray, ...]:
        """``rank, home, low..., high...``, flat, each box once for each rank."""
        rank, home, *rest = self.distinct(self.rank, self.home, *self.low, *self.size)
        return rank, home, *self._with_ends(rest)

    def _with_ends(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """``low..., high..., more...`` of ``low..., size..., more...``."""
        axes = len(self.low)
        low, size, more = arrays[:axes], arrays[axes : 2 * axes], arrays[2 * axes :]
        return [*low, *(a + n for a, n in zip(low, size, strict=True)), *more]

    @cached_property
    def bounds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """``low, high`` of each axis behind the rank's, flat, those that occur."""
        found = [self.distinct(*pair) for pair in zip(self.low, self.size, strict=True)]
        return [(low, low + size) for low, size in found]

    def ranks_and_homes(self) -> set[tuple[int, int]]:
        """Which ranks touch whose copies."""
        rank, home = self.distinct(self.rank, self.home)
        return set(zip(rank.tolist(), home.tolist(), strict=True))


def combinations(fields: Sequence[np.ndarray], mask: np.ndarray) -> list[np.ndarray]:
    """The combinations of ``fields``, flat, where ``mask`` holds, each once where they are few
    enough to be marked in a table.

    Fields that vary along no axis in common are looked at apart: of these all combinations occur.
    """
    found: dict[int, np.ndarray] = {}
    length = 1
    for numbers in _apart([mask, *fields]):
        with_mask = numbers[0] == 0
        numbers = numbers[with_mask:]
        if numbers:
            columns = _marked([fields[n - 1] for n in numbers], mask if with_mask else _TRUE)
            new = len(columns[0])
        else:
            columns, new = (), int(mask.any())
        found = {n: np.repeat(column, new) for n, column in found.items()}
        found |= {n: np.tile(c, length) for n, c in zip(numbers, columns, strict=True)}
        length *= new
    return [found[n] for n in sorted(found)]


def _apart(arrays: Sequence[np.ndarray], along: Sequence[int] | None = None) -> list[list[int]]:
    """The numbers of those that, one by one, vary along an axis in common, of those ``along`` which
    they are asked to; axes are counted from the last."""
    sets: list[tuple[set[int], list[int]]] = []
    for number, array in enumerate(arrays):
        axes = {a - array.ndim for a, n in enumerate(array.shape) if n != 1}
        if along is not None:
            axes &= {a - array.ndim for a in along}
        numbers = [number]
        for others, known in [s for s in sets if s[0] & axes]:
            sets.remove((others, known))
            axes, numbers = axes | others, known + numbers
        sets.append((axes, sorted(numbers)))
    return [numbers for _, numbers in sets]


def _where(mask: np.ndarray, values: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    holds, *every = np.broadcast_arrays(mask, *values)
    if holds.all():
        return tuple(a.ravel() for a in every)
    return tuple(a[holds] for a in every)


def _marked(fields: Sequence[np.ndarray], mask: np.ndarray) -> Sequence[np.ndarray]:
    """The combinations that occur, once each: marked in a table, which takes a tenth of the time of
    sorting them. Every one of them where they are negative, or too many could occur."""
    if any(a.min(initial=0) < 0 for a in fields):
        return _where(mask, fields)
    units = [int(np.gcd.reduce(a, axis=None)) or 1 for a in fields]
    radix = [int(a.max(initial=0)) // u + 1 for a, u in zip(fields, units, strict=True)]
    if math.prod(radix) > _TABLE:
        return _where(mask, fields)
    code = np.int64(0)
    for one, unit, n in zip(fields, units, radix, strict=True):
        code = code * n + one // unit
    seen = np.zeros(math.prod(radix), np.bool_)
    seen[_where(mask, [np.asarray(code)])] = True
    left, out = np.flatnonzero(seen), []
    for n, unit in zip(reversed(radix), reversed(units), strict=True):
        left, digit = np.divmod(left, n)
        out.insert(0, digit * unit)
    return out


def access_footprints(access: Access, program: Program, world_size: int) -> Footprints:
    """The boxes of ``access`` on all ranks; of a read of which only the running kernel knows where
    it is, or whether, all that it may touch.

    Raises:
        LanguageError: where it happens, or what it touches, is only known while the kernel runs, or
            has no shape of a box.
    """
    if access.rounds_unknown:
        raise _refused(
            access, f"happens as often as {access.rounds_unknown} holds", "a loop over a range"
        )
    try:
        return _boxes(access, Region.of(access), program, world_size)
    except NotEvaluable as error:
        unknown = error
    try:
        if access.kind == "read":
            return _boxes(access, possible_region(access, program, world_size), program, world_size)
    except NotEvaluable as error:
        unknown = error
    raise _refused(
        access,
        f"depends on {format_expr(unknown.node)}, which only the running kernel knows",
        "indices and conditions made of the rank, block indices and loops"
        f"{_dynamic_instead(access, program)}",
    )


def _dynamic_instead(access: Access, program: Program) -> str:
    """Return what to write instead of the scalar parameters that decide where an access happens:
    sizes become constants before the inference."""
    func = program.func
    assert func is not None
    scalars = [p for p in func.params if p not in func.buffer_map]
    left: list[tirx.PrimExpr] = [*access.starts, *access.extents, *access.conditions]
    for loop in (*program.grid, *access.loops, *access.inner):
        left += [loop.min, loop.extent]
    named: set[tirx.Var] = set()
    while left:
        for variable in set(variables_in(left.pop())) - named:
            named.add(variable)
            if variable in program.values:
                left.append(program.values[variable])
    names = [p.name for p in scalars if p in named]
    if not names:
        return ""
    sizes = ", ".join(f"T.dynamic({name!r})" for name in names)
    return f", or {sizes} as extents of tensors instead of scalar parameters"


def _boxes(access: Access, region: Region, program: Program, world_size: int) -> Footprints:
    outer, inside = len(access.loops) + 1, len(access.loops) + 1 + len(access.inner)
    loops = [*access.loops, *access.inner, *region.places]
    space = Space(world_size, loops, program.values, partly=not region.is_certain)
    inner = tuple(range(outer, inside))
    conditions = [space.of(c).astype(np.bool_) for c in region.conditions]
    # Apart, as their product has the axes of both.
    around, mask = _all_apart([space.inside, *conditions], inner)
    skipped = tuple(n for n in range(len(access.loops)) if _skips(space.skipped[n], conditions))
    starts = [space.of(s) for s in region.starts]
    extents = [space.of(e) for e in region.extents]
    block = space.number_of(program.grid)
    shape = [int(space.of(e).max()) for e in access.tensor.shape]
    happens: np.ndarray = around & mask.any(axis=inner, keepdims=True)
    merged = merged_footprints(starts, extents, mask, inner, happens)
    if merged is None:
        raise _refused(access, "touches elements that are no box without holes", "a box")
    low, size = merged
    if _meet(size[0] != 1, happens):
        raise _refused(access, "touches the copies of several ranks at once", "one rank a time")
    asked = _asked(access, region, program, space, (around, mask), happens)
    wrong = (low[0] < 0) | (low[0] >= world_size)
    if _meet(wrong, happens):
        (found,) = _where(wrong & happens, [low[0]])
        raise _refused(access, f"has rank index {found.min()}", f"0 to {world_size - 1}")
    home = np.clip(low[0], 0, world_size - 1)
    if access.is_run and any(
        _meet(a + b > n, happens) for a, b, n in zip(low[1:], size[1:], shape[1:], strict=True)
    ):
        raise _refused(access, "runs over the end of a row", "part of a row, or whole rows")
    shifts = tuple(
        _constant(*_where(happens, [a - _first(start, inner)]))
        for a, start in zip(low, starts if inner else (), strict=bool(inner))
    )
    clipped = [
        _clipped(a, b, n, happens) for a, b, n in zip(low[1:], size[1:], shape[1:], strict=True)
    ]
    before = tuple(axis for axis, a in enumerate(low[1:]) if _meet(a < 0, happens))
    beyond = [a >= n for a, n in zip(low[1:], shape[1:], strict=True)]
    outside = tuple(axis for axis, some in enumerate(beyond) if _meet(some, happens))
    misses = bool(outside) or any(
        _meet(a + b <= 0, happens) for a, b in zip(low[1:], size[1:], strict=True)
    )
    for axis in outside:
        happens = happens & ~beyond[axis]
    bounds = [a for c in clipped for a in c]
    varies = np.broadcast_shapes(space.rank.shape, happens.shape, home.shape,
                                 *(a.shape for a in bounds))  # fmt: skip
    repeats = 1
    for axis in range(outer):
        repeats *= space.shape[axis] if varies[axis] == 1 else 1
    return Footprints(
        access, space.rank, home, tuple(c[0] for c in clipped),
        tuple(c[1] for c in clipped), happens, block, repeats,
        outside, before, misses and region.is_certain, skipped, region.open_axes,
        region.open_loops, region.is_certain, asked, shifts,
    )  # fmt: skip


def _asked(
    access: Access, region: Region, program: Program, space: Space,
    masks: tuple[np.ndarray, np.ndarray], happens: np.ndarray,
) -> tuple[tirx.PrimExpr, ...]:  # fmt: skip
    """See ``Footprints.asked``; of both masks what holds together."""
    branches = access.conditions[: access.branches]
    outer = [c for c in region.conditions if any(c.same_as(b) for b in branches)]
    within = [c for c in region.conditions if not any(c.same_as(o) for o in outer)]
    if not within:
        return ()
    axes = range(len(access.loops) + 1, len(access.loops) + 1 + len(access.inner))
    reached = np.logical_or.reduce(space.inside, axis=tuple(axes), keepdims=True)
    for condition in outer:
        reached = reached & space.of(condition).astype(np.bool_)
    if not np.any(reached & ~happens):
        return ()
    mask = masks[0] & masks[1]
    often = mask.sum(axis=tuple(a for a in range(mask.ndim) if a not in axes))
    rounds = np.unravel_index(np.argmax(often), often.shape)
    at = mask
    for axis, number in zip(axes, rounds, strict=True):
        at = np.take(at, [number], axis=axis)
    if np.all((at & reached) == happens):
        first = {
            loop.var: loop.min + int(number)
            for loop, number in zip(access.inner, rounds, strict=True)
        }
        symbols = Symbols(program, space.shape[0])
        return tuple(substitute(symbols.inlined(condition), first) for condition in within)
    raise _refused(
        access, "leaves out all rounds of a loop, where its conditions do not all hold in one",
        "conditions that hold in one certain round if in any",
    )  # fmt: skip


def _all_apart(
    conditions: Sequence[np.ndarray], axes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Where all hold that do not vary along ``axes``, and where all others do."""
    one = np.ones_like(conditions[0], shape=(1,) * conditions[0].ndim)
    around, within = one, one
    for each in conditions:
        if any(each.shape[a] > 1 for a in axes):
            within = within & each
        else:
            around = around & each
    return around, within


def _skips(skipped: np.ndarray, conditions: Sequence[np.ndarray]) -> bool:
    """Whether a loop has no round somewhere where the conditions hold."""
    for condition in conditions if skipped.any() else ():
        skipped = skipped & condition
    return bool(np.any(skipped))


def _meet(some: np.ndarray, happens: np.ndarray) -> bool:
    """Whether both hold somewhere. They are not broadcast for nothing."""
    return bool(some.any()) and bool(np.any(some & happens))


def _clipped(
    low: np.ndarray, size: np.ndarray, extent: int, happens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What of boxes lies in an axis; where they do not happen, something that does. As small as
    given, unless some go beyond."""
    high = low + size
    if _meet((low < 0) | (high > extent), happens):
        low = np.maximum(low, 0)
        return low, np.clip(high, 0, extent) - low
    return np.clip(low, 0, max(extent - 1, 0)), size


def merged_footprints(starts, extents, mask, inner, happens):
    """Starts and sizes of boxes over the axes ``inner``, where the mask holds; None if some that
    happen do not fill theirs without holes."""
    if not inner:
        return starts, extents
    same = [a for a in inner if all(v.shape[a] == 1 for v in (*starts, *extents))]
    mask = mask.any(axis=tuple(same), keepdims=True) if same else mask
    partial = any(mask.shape[a] > 1 for a in inner)
    low, size, count = [], [], np.int64(1)
    for start, extent in zip(starts, extents, strict=True):
        if partial:
            big, end = np.int64(1) << 62, start + extent
            fixed = tuple(a for a in inner if end.shape[a] == 1)
            holds = mask.any(axis=fixed, keepdims=True)
            first = np.where(holds, start, big).min(axis=inner, keepdims=True)
            last = np.where(holds, end, -big).max(axis=inner, keepdims=True)
        else:
            first = start.min(axis=inner, keepdims=True)
            last = (start + extent).max(axis=inner, keepdims=True)
        low.append(first)
        size.append(last - first)
        count = count * size[-1]
    touched = np.int64(1)
    for extent in extents:
        touched = touched * extent.max(axis=inner, keepdims=True)
    groups = [[starts[n] for n in numbers] for numbers in _apart(starts, inner)]
    places = [_distinct_places(group, inner) for group in groups]
    shapes = [np.broadcast_shapes(*(s.shape for s in group)) for group in groups]
    every = [math.prod(shape[a] for a in inner) for shape in shapes]
    if not partial:
        for some in places:
            touched = touched * some
    elif all(np.all(some == one) for some, one in zip(places, every, strict=True)):
        shape = np.broadcast_shapes(*(s.shape for s in starts))
        alike = math.prod(shape[a] for a in inner if mask.shape[a] == 1)
        touched = touched * alike * mask.sum(axis=inner, keepdims=True)
    else:
        touched = touched * _distinct_places(starts, inner, mask)
    if _meet(touched != count, happens):
        return None
    return low, size


def _distinct_places(
    starts: Sequence[np.ndarray], inner: tuple[int, ...], mask: np.ndarray = _TRUE
) -> np.ndarray:
    """How many combinations of ``starts`` occur over the axes ``inner``, where the mask holds:
    several threads may touch the same."""
    code = np.int64(0)
    for start in (_relative(s, inner) for s in starts):
        low, high = int(start.min(initial=0)), int(start.max(initial=0))
        code = code * (high - low + 1) + (start - low)
    code = np.where(mask, code, -1)
    code = np.moveaxis(code, inner, range(-len(inner), 0))
    code = np.sort(code.reshape(*code.shape[: code.ndim - len(inner)], -1))
    new = np.diff(code, prepend=-1) != 0
    return np.expand_dims(new.sum(axis=-1), inner)


def _relative(start: np.ndarray, inner: tuple[int, ...]) -> np.ndarray:
    """``start`` behind that of the first rounds of the loops of ``inner``, once where the other
    loops do not change it."""
    behind = start - _first(start, inner)
    for axis in (a for a in range(behind.ndim) if a not in inner and behind.shape[a] > 1):
        once = np.take(behind, [0], axis=axis)
        behind = once if np.all(behind == once) else behind
    return behind


def _first(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """``values`` in the first rounds of the loops of ``axes``."""
    for axis in axes:
        values = np.take(values, [0], axis=axis)
    return values


def _constant(values: np.ndarray) -> int | None:
    """The one of ``values``, 0 of none; None if they differ."""
    if not values.size:
        return 0
    return int(values.flat[0]) if np.ptp(values) == 0 else None


def _refused(access: Access, what: str, expected: str) -> LanguageError:
    return LanguageError(
        f"{access.text}, which {what}; expected {expected}, {_EXPECTED}, or W.unordered"
        f"{access.location}"
    )
