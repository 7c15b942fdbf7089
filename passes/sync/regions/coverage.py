"""A symmetric tensor cut into cells, and who touches each of them in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .accesses import Kind
from .footprints import Footprints

_PIECE = 1 << 20
"""Cells painted at a time: keeps temporary arrays small."""


def volumes(
    shape: Sequence[int], size: Sequence[int], ends: Sequence[int] | None = None
) -> np.ndarray:
    """Elements in each box of ``size`` that ``shape`` is cut into; the last of an axis may be
    smaller, and those behind ``ends``, by default those of ``shape``, do not count."""
    out = np.ones((), np.int64)
    for extent, step, end in zip(shape, size, ends or shape, strict=True):
        out = np.multiply.outer(out, np.clip(end - np.arange(0, extent, step), 0, step))
    return out


class CellGrid:
    """A tensor's axes behind the rank's, cut at every place where a box begins or ends."""

    def __init__(self, shape: Sequence[int], footprints: Sequence[Footprints]) -> None:
        self.shape = tuple(shape)
        self.cell = tuple(
            self._cut(n, [ends for b in footprints for ends in b.bounds[a]])
            for a, n in enumerate(self.shape)
        )
        self.cells = tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    @staticmethod
    def _cut(extent: int, ends_of: list[np.ndarray]) -> int:
        step = 0
        for ends in ends_of:
            step = int(np.gcd.reduce(ends[ends < extent], initial=step))
        return step or extent

    def cells_of(self, footprints: Footprints, *, each: bool = False):
        """The flat arrays ``rank, home`` of all boxes, and, in pieces, (box number, cell number)
        of all their cells.

        Args:
            each: a box as often as a rank touches it, not once.
        """
        axes = len(self.shape)
        rank, home, *rest = footprints.flat() if each else footprints.each
        return rank, home, self.cells_in(home, rest[:axes], rest[axes:])

    def cells_in(self, home, low, high):
        """In pieces, (box number, cell number) of all cells of boxes given as flat arrays."""
        first = [a // c for a, c in zip(low, self.cell, strict=True)]
        count = [-(-b // c) - f for b, c, f in zip(high, self.cell, first, strict=True)]
        most = [int(n.max(initial=0)) for n in count]
        total = int(np.prod(most, dtype=np.int64))
        boxes_a_piece = max(1, _PIECE // max(1, total))
        offsets = np.indices(most).reshape(len(most), total)
        for start in range(0, len(home), boxes_a_piece):
            part = slice(start, start + boxes_a_piece)
            number = home[part, None]
            inside = np.ones((1, 1), np.bool_)
            for axis in range(len(most)):
                inside = inside & (offsets[axis] < count[axis][part, None])
                number = number * self.cells[axis] + first[axis][part, None] + offsets[axis]
            inside = np.broadcast_to(inside, number.shape)
            box = np.broadcast_to(np.arange(start, start + len(number))[:, None], number.shape)
            yield box[inside], number[inside]


@dataclass(eq=False)
class Coverage:
    """What one kind of access does to each cell of every rank's copy, in flat arrays.

    Attributes:
        times: how often it is touched; by reads, at least once.
        ranks: which ranks touch it, a bit each.
    """

    times: np.ndarray
    ranks: np.ndarray

    @classmethod
    def by(
        cls, grid: CellGrid, world_size: int, kind: Kind, footprints: Sequence[Footprints]
    ) -> Coverage:
        size = world_size * int(np.prod(grid.cells, dtype=np.int64))
        out = cls(np.zeros(size, np.int64), np.zeros(size, np.int64))
        for one in footprints:
            rank, _, pieces = grid.cells_of(one, each=kind != "read")
            for box, cell in pieces:
                out.times += one.repeats * np.bincount(cell, minlength=size)
                by = rank[box]
                for r in range(world_size):
                    out.ranks[cell[by == r]] |= 1 << r
        return out
