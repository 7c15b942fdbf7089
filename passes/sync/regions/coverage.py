"""Cells of a symmetric tensor, and the ranks that access each cell in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .accesses import Kind
from .footprints import Footprints

_CHUNK = 1 << 20
"""Cells that are enumerated at a time. The limit keeps temporary arrays small."""

Cells = Iterator[tuple[np.ndarray, np.ndarray]]
"""Cells of boxes in chunks: flat arrays of box numbers, and of the cell numbers in these boxes."""


def volumes(
    shape: Sequence[int], size: Sequence[int], ends: Sequence[int] | None = None
) -> np.ndarray:
    """Return the number of elements in each box when ``shape`` is divided into boxes of ``size``.

    The last box of an axis may be smaller.

    Args:
        ends: end of each axis, by default ``shape``; elements after it do not count.
    """
    out = np.ones((), np.int64)
    for extent, step, end in zip(shape, size, ends or shape, strict=True):
        out = np.multiply.outer(out, np.clip(end - np.arange(0, extent, step), 0, step))
    return out


class CellGrid:
    """Grid over a tensor's axes without the rank axis: each box begins and ends at cell borders.

    Cells are numbered in row-major order of the axes; the owner of the copy is the first axis.
    """

    def __init__(self, shape: Sequence[int], footprints: Sequence[Footprints]) -> None:
        self.shape = tuple(shape)
        self.cell = tuple(
            self._cell_size(n, [ends for f in footprints for ends in f.bounds[a]])
            for a, n in enumerate(self.shape)
        )
        self.cells = tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    @staticmethod
    def _cell_size(extent: int, ends_of: list[np.ndarray]) -> int:
        step = 0
        for ends in ends_of:
            step = int(np.gcd.reduce(ends[ends < extent], initial=step))
        return step or extent

    def cells_of(
        self, footprints: Footprints, *, repeated: bool = False
    ) -> tuple[np.ndarray, np.ndarray, Cells]:
        """Return the flat arrays ``rank, owner`` of all boxes, and the cells of the boxes.

        Args:
            repeated: repeat a box as often as a rank accesses it, instead of listing it once.
        """
        axes = len(self.shape)
        rank, owner, *rest = footprints.flat() if repeated else footprints.unique_boxes
        return rank, owner, self.cells_in(owner, rest[:axes], rest[axes:])

    def cells_in(
        self, owner: np.ndarray, low: Sequence[np.ndarray], high: Sequence[np.ndarray]
    ) -> Cells:
        """Yield the cells of the boxes in flat arrays."""
        first = [begin // size for begin, size in zip(low, self.cell, strict=True)]
        count = [
            -(-end // size) - cell for end, size, cell in zip(high, self.cell, first, strict=True)
        ]
        max_cells = [int(n.max(initial=0)) for n in count]
        total = int(np.prod(max_cells, dtype=np.int64))
        boxes_per_chunk = max(1, _CHUNK // max(1, total))
        offsets = np.indices(max_cells).reshape(len(max_cells), total)
        for start in range(0, len(owner), boxes_per_chunk):
            part = slice(start, start + boxes_per_chunk)
            number = owner[part, None]
            mask = np.ones((1, 1), np.bool_)
            for axis, cells in enumerate(self.cells):
                if max_cells[axis] > 1:
                    mask = mask & (offsets[axis] < count[axis][part, None])
                if cells > 1:
                    number = number * cells + first[axis][part, None] + offsets[axis]
            box = np.broadcast_to(np.arange(start, start + len(number))[:, None], number.shape)
            if mask.all():
                yield box.ravel(), number.ravel()
            else:
                mask = np.broadcast_to(mask, number.shape)
                yield box[mask], number[mask]


@dataclass(eq=False)
class Coverage:
    """Accesses of one kind to each cell of every rank's copy, as flat arrays.

    Attributes:
        times: number of accesses to the cell; for reads and possible writes, a lower bound.
        ranks: ranks that access the cell, one bit each: there are at most ``MAX_INFERRED_RANKS``.
    """

    times: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of_accesses(
        cls, grid: CellGrid, world_size: int, kind: Kind, footprints: Sequence[Footprints]
    ) -> Coverage:
        size = world_size * int(np.prod(grid.cells, dtype=np.int64))
        coverage = cls(np.zeros(size, np.int64), np.zeros(size, np.int64))
        for boxes in footprints:
            rank, _, chunks = grid.cells_of(boxes, repeated=kind != "read" and boxes.is_certain)
            is_accessed = np.zeros((world_size, size), np.bool_)
            for box, cell in chunks:
                coverage.times += boxes.repeats * np.bincount(cell, minlength=size)
                is_accessed[rank[box], cell] = True
            for r in range(world_size):
                coverage.ranks[is_accessed[r]] |= 1 << r
        return coverage
