"""The boxes that an access touches, in all its iterations, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...builtins.errors import LanguageError
from ..walk import in_words
from .accesses import Access, Program
from .space import NotEvaluable, Space

_TABLE = 1 << 25
_EXPECTED = "signals and waits written by hand"


@dataclass(frozen=True, eq=False)
class Boxes:
    """Arrays that broadcast against each other, an axis for the rank and each loop around it.

    Attributes:
        access: whose they are.
        rank: the rank that runs the iteration.
        home: in whose copy the box lies.
        low, high: of each axis behind the rank's; clipped to the tensor.
        mask: in which iterations it happens.
        block: number of the block that runs it, in launch order.
        repeats: how many iterations do the very same.
        extents: of each axis behind the rank's before clipping; one number where it is constant.
    """

    access: Access
    rank: np.ndarray
    home: np.ndarray
    low: tuple[np.ndarray, ...]
    high: tuple[np.ndarray, ...]
    mask: np.ndarray
    block: np.ndarray
    repeats: int
    extents: tuple[int | None, ...]

    def flat(self, *more: np.ndarray) -> tuple[np.ndarray, ...]:
        """``rank, home, low..., high..., *more`` of the iterations in which it happens."""
        return self.where(self.rank, self.home, *self.low, *self.high, *more)

    def where(self, *values: np.ndarray) -> tuple[np.ndarray, ...]:
        """``values``, flat, of the iterations in which it happens; once for those that differ in
        none of them."""
        mask, *every = np.broadcast_arrays(self.mask, *values)
        if mask.all():
            return tuple(a.ravel() for a in every)
        return tuple(a[mask] for a in every)

    @cached_property
    def distinct(self) -> tuple[np.ndarray, ...]:
        """``rank, home, low..., high...``, flat, each box once for each rank where the combinations
        of these are few enough to be marked in a table."""
        sizes = [high - low for low, high in zip(self.low, self.high, strict=True)]
        found = distinct((self.rank, self.home, *self.low, *sizes), self.where)
        if found is None:
            return self.flat()
        axes = len(self.low)
        rank, home, low, size = found[0], found[1], found[2 : 2 + axes], found[2 + axes :]
        return rank, home, *low, *(a + n for a, n in zip(low, size, strict=True))

    def ranks_and_homes(self) -> set[tuple[int, int]]:
        """Which ranks touch whose copies."""
        rank, home, *_ = self.distinct
        codes = np.flatnonzero(np.bincount((rank << 8) + home))
        return {divmod(int(code), 1 << 8) for code in codes}


def distinct(
    fields: Sequence[np.ndarray], pick: Callable[[np.ndarray], tuple[np.ndarray, ...]]
) -> list[np.ndarray] | None:
    """The combinations of ``fields`` that occur, once each: marked in a table, which takes a tenth
    of the time of sorting them. None where they are negative, or too many could occur.

    Args:
        pick: the code of each combination -> of those that count.
    """
    if any(a.min(initial=0) < 0 for a in fields):
        return None
    units = [int(np.gcd.reduce(a, axis=None)) or 1 for a in fields]
    radix = [int(a.max(initial=0)) // u + 1 for a, u in zip(fields, units, strict=True)]
    if math.prod(radix) > _TABLE:
        return None
    code = np.int64(0)
    for field, unit, n in zip(fields, units, radix, strict=True):
        code = code * n + field // unit
    seen = np.zeros(math.prod(radix), np.bool_)
    seen[pick(np.asarray(code))] = True
    left, out = np.flatnonzero(seen), []
    for n, unit in zip(reversed(radix), reversed(units), strict=True):
        left, digit = np.divmod(left, n)
        out.insert(0, digit * unit)
    return out


def boxes_of(access: Access, program: Program, world_size: int) -> Boxes:
    """The boxes of ``access`` on all ranks.

    Raises:
        LanguageError: where it happens, or what it touches, is only known while the kernel runs, or
            has no shape of a box.
    """
    if access.rounds_unknown:
        raise _refused(
            access, f"happens as often as {access.rounds_unknown} holds", "a loop over a range"
        )
    outer = len(access.loops) + 1
    try:
        space = Space(world_size, [*access.loops, *access.inner], program.values)
        mask = space.inside
        for condition in access.conditions:
            mask = mask & space.of(condition).astype(np.bool_)
        starts = [space.of(s) for s in access.starts]
        extents = [space.of(e) for e in access.extents]
        block = space.number_of(program.grid)
        shape = [int(space.of(e).max()) for e in access.tensor.shape]
    except NotEvaluable as error:
        raise _refused(
            access,
            f"depends on {in_words(error.node)}, which only the running kernel knows",
            "indices and conditions made of the rank, block indices and loops",
        ) from None
    inner = tuple(range(outer, len(space.shape)))
    bounds = merged_bounds(space, starts, extents, mask, inner)
    if bounds is None:
        raise _refused(access, "touches elements that are no box without holes", "a box")
    low, high = bounds
    if np.any((high[0] - low[0] != 1) & mask.any(axis=inner, keepdims=True)):
        raise _refused(access, "touches the copies of several ranks at once", "one rank a time")
    happens = mask.any(axis=inner, keepdims=True)
    home = np.where(happens, low[0], 0)
    if np.any((home < 0) | (home >= world_size)):
        found = sorted(set(home[(home < 0) | (home >= world_size)].ravel().tolist()))
        raise _refused(access, f"has rank index {found[0]}", f"0 to {world_size - 1}")
    if access.is_run and any(
        np.any((b > n) & happens) for b, n in zip(high[1:], shape[1:], strict=True)
    ):
        raise _refused(access, "runs over the end of a row", "part of a row, or whole rows")
    clipped = [
        (np.maximum(a, 0), np.minimum(b, n)) for a, b, n in zip(low, high, shape, strict=True)
    ]
    bounds = [a for c in clipped[1:] for a in c]
    varies = np.broadcast_shapes(space.rank.shape, happens.shape, home.shape,
                                 *(a.shape for a in bounds))  # fmt: skip
    repeats = 1
    for axis in range(outer):
        repeats *= space.shape[axis] if varies[axis] == 1 else 1
    return Boxes(
        access, space.rank, home, tuple(c[0] for c in clipped[1:]),
        tuple(c[1] for c in clipped[1:]), happens, block, repeats,
        tuple(_constant(b - a) for a, b in zip(low[1:], high[1:], strict=True)),
    )  # fmt: skip


def merged_bounds(space, starts, extents, mask, inner):
    """Low and high bounds of boxes over the axes ``inner``, where the mask holds; None if some do
    not fill theirs without holes."""
    if not inner:
        return starts, [s + e for s, e in zip(starts, extents, strict=True)]
    partial = any(mask.shape[a] > 1 for a in inner)
    low, high, count = [], [], np.int64(1)
    for start, extent in zip(starts, extents, strict=True):
        if partial:
            big = np.int64(1) << 62
            first = np.where(mask, start, big).min(axis=inner, keepdims=True)
            last = np.where(mask, start + extent, -big).max(axis=inner, keepdims=True)
        else:
            first = start.min(axis=inner, keepdims=True)
            last = (start + extent).max(axis=inner, keepdims=True)
        low.append(first)
        high.append(last)
        count = count * (last - first)
    touched = np.int64(1)
    for extent in extents:
        touched = touched * extent.max(axis=inner, keepdims=True)
    if partial:
        where = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, *(s.shape for s in starts)))
        touched = touched * where.sum(axis=inner, keepdims=True)
    else:
        for axis in inner:
            if any(s.shape[axis] > 1 for s in starts):
                touched = touched * space.shape[axis]
    happens = mask.any(axis=inner, keepdims=True)
    if np.any((touched != count) & happens):
        return None
    return low, high


def _constant(values: np.ndarray) -> int | None:
    return int(values.flat[0]) if values.size and np.ptp(values) == 0 else None


def _refused(access: Access, what: str, expected: str) -> LanguageError:
    return LanguageError(
        f"{access.text}, which {what}; expected {expected}, {_EXPECTED}, or W.unordered"
        f"{access.location}"
    )
