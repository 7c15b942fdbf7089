"""A symmetric tensor cut into cells, and who touches each of them in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .boxes import Boxes

_PIECE = 1 << 20
"""Cells painted at a time: keeps temporary arrays small."""


class Grid:
    """A tensor's axes behind the rank's, cut at every place where a box begins or ends."""

    def __init__(self, shape: Sequence[int], boxes: Sequence[Boxes]) -> None:
        self.shape = tuple(shape)
        self.cell = tuple(
            self._cut(n, [_used(b.mask, b.low[a]) for b in boxes],
                      [_used(b.mask, b.high[a]) for b in boxes])
            for a, n in enumerate(self.shape)
        )  # fmt: skip
        self.cells = tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    @staticmethod
    def _cut(extent: int, low: list[np.ndarray], high: list[np.ndarray]) -> int:
        bounds = np.concatenate([np.unique(v) for v in low + high] or [np.zeros(0, np.int64)])
        step = int(np.gcd.reduce(bounds[bounds < extent], initial=0))
        return step or extent

    def cells_of(self, boxes: Boxes):
        """The flat arrays ``rank, home`` of all boxes, and, in pieces, (box number, cell number)
        of all their cells."""
        axes = len(self.shape)
        rank, home, *rest = boxes.flat()
        low, high = rest[:axes], rest[axes:]
        first = [a // c for a, c in zip(low, self.cell, strict=True)]
        count = [-(-b // c) - f for b, c, f in zip(high, self.cell, first, strict=True)]
        most = [int(n.max(initial=0)) for n in count]
        return rank, home, self._pieces(home, first, count, most)

    def _pieces(self, home, first, count, most):
        total = int(np.prod(most, dtype=np.int64))
        boxes_a_piece = max(1, _PIECE // max(1, total))
        offsets = (
            np.indices(most).reshape(len(most), -1) if total else np.zeros((len(most), 0), int)
        )
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


def _used(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    if mask.all():
        return values
    mask, values = np.broadcast_arrays(mask, values)
    return values[mask]


@dataclass(eq=False)
class Painted:
    """What one kind of access does to each cell of every rank's copy, in flat arrays.

    Attributes:
        times: how often it is touched.
        ranks: which ranks touch it, a bit each.
    """

    times: np.ndarray
    ranks: np.ndarray

    @classmethod
    def by(cls, grid: Grid, world_size: int, boxes: Sequence[Boxes]) -> Painted:
        size = world_size * int(np.prod(grid.cells, dtype=np.int64))
        out = cls(np.zeros(size, np.int64), np.zeros(size, np.int64))
        for one in boxes:
            rank, _, pieces = grid.cells_of(one)
            for box, cell in pieces:
                out.times += one.repeats * np.bincount(cell, minlength=size)
                for r in range(world_size):
                    out.ranks[cell[rank[box] == r]] |= 1 << r
        return out
