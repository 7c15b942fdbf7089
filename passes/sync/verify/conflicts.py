"""Conflicts: writes and reads of the same element of a symmetric tensor by different blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .events import DATA, Event
from .happens_before import Place, Timeline
from .launches import Rows, UnverifiedEvent

_MAX_COUNT = 1 << 22
"""Limit of the cells, and of the pairs of accesses, of one tensor; larger ones are not verified."""


@dataclass(frozen=True, eq=False)
class BlockAccess:
    """One access by one block.

    Attributes:
        number: number of the block on its rank.
        block: number of the block among those of all ranks and launches.
        position: position of the access in the order of all events.
    """

    event: Event
    launch: int
    rank: int
    number: int
    block: int
    position: int

    @property
    def place(self) -> Place:
        return self.block, self.position


@dataclass(frozen=True, eq=False)
class Conflict:
    """A write and a read of the same element by different blocks."""

    write: BlockAccess
    read: BlockAccess


def conflicts(timeline: Timeline, world_size: int) -> tuple[list[Conflict], list[UnverifiedEvent]]:
    """Return all pairs of accesses that need an order, and the tensors that are too large.

    Pairs within one launch come first. Pairs between the same synchronization operations are
    equivalent; only one of them is returned.
    """
    by_tensor: dict[str, list[Rows]] = defaultdict(list)
    synced = np.sort(np.concatenate(
        [timeline.position[r] for r in timeline.rows if r.event.kind not in DATA]
        or [np.zeros(0, np.int64)]
    ))  # fmt: skip
    for rows in timeline.rows:
        if rows.event.kind in DATA:
            by_tensor[rows.event.tensor.name].append(rows)
    pairs: list[tuple[int, Conflict]] = []
    unverified: list[UnverifiedEvent] = []
    for rows in by_tensor.values():
        accesses = _BlockAccesses(timeline, rows, world_size, synced)
        for write, read in accesses.pairs():
            launches_apart = abs(write.launch - read.launch)
            pairs.append((launches_apart, Conflict(write, read)))
        unverified += accesses.unverified
    pairs.sort(key=lambda pair: pair[0])
    return [conflict for _, conflict in pairs], unverified


class _BlockAccesses:
    """Accesses to one tensor as flat arrays."""

    def __init__(
        self, timeline: Timeline, rows: list[Rows], world_size: int, synced: np.ndarray
    ) -> None:
        self._timeline, self._rows = timeline, rows
        self.unverified: list[UnverifiedEvent] = []
        axes = len(rows[0].low)

        def joined(column) -> np.ndarray:
            return np.concatenate([column(r) for r in rows])

        self.low = np.stack([joined(lambda r, a=a: r.low[a]) for a in range(axes)], axis=1)
        self.high = np.stack([joined(lambda r, a=a: r.high[a]) for a in range(axes)], axis=1)
        self.source = np.concatenate([np.full(r.rank.size, n) for n, r in enumerate(rows)])
        self.reads = joined(lambda r: np.full(r.rank.shape, r.event.kind == "read"))
        self.launch, self.rank = joined(lambda r: r.launch), joined(lambda r: r.rank)
        self.number = joined(lambda r: r.block)
        self.block = joined(lambda r: timeline.block[r])
        self.position = joined(lambda r: timeline.position[r])
        self.segment = np.searchsorted(synced, self.position)
        self._inside = np.all(self.low < self.high, axis=1) & (self.low[:, 0] >= 0)
        self._inside &= self.high[:, 0] <= world_size

    def pairs(self) -> Iterator[tuple[BlockAccess, BlockAccess]]:
        row, cell = self._cells()
        reads = self.reads[row]
        readers = self._distinct(row[reads], cell[reads])
        writers = self._distinct(row[~reads], cell[~reads])
        conflicting = self._conflicting_rows(writers, readers)
        used = sorted({row for pair in conflicting for row in pair})
        columns = (self.source, self.launch, self.rank, self.number, self.block, self.position)
        fields = zip(*(c[used].tolist() for c in columns), strict=True)
        accesses = {
            row: BlockAccess(self._rows[source].event, *values)
            for row, (source, *values) in zip(used, fields, strict=True)
        }
        for w, r in conflicting:
            yield accesses[w], accesses[r]

    def _are_too_many(self, count: int, unit: str) -> bool:
        if count > _MAX_COUNT:
            unit = f"{unit} in the analyzed launches"
            self.unverified.append(UnverifiedEvent(self._rows[0].event, count, _MAX_COUNT, unit))
        return count > _MAX_COUNT

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Return flat arrays (row, cell) of the cells of all rows; no access divides a cell.

        The arrays are empty if there are too many cells.
        """
        rows = np.flatnonzero(self._inside)
        low, high = np.maximum(self.low[rows], 0), self.high[rows]
        axes = [_divide_axis(low[:, axis], high[:, axis]) for axis in range(low.shape[1])]
        total = math.prod(count for _, _, count in axes).sum()
        if self._are_too_many(int(total), "cells into which its accesses divide it"):
            return rows[:0], rows[:0]
        index, cell = np.arange(rows.size), np.zeros(rows.size, np.int64)
        for bounds, first, count in axes:
            first, count = first[index], count[index]
            index, offset = np.repeat(index, count), _offsets(count)
            cell = np.repeat(cell, count) * bounds + np.repeat(first, count) + offset
        return rows[index], cell

    def _distinct(self, row: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keep one row for each cell, block and segment between synchronization operations."""
        key = np.stack([cell, self.block[row], self.segment[row]], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        return row[first], cell[first]

    def _conflicting_rows(self, writers, readers) -> list[tuple[int, int]]:
        """Return pairs of rows that write and read a common cell in different blocks."""
        (w_row, w_cell), (r_row, r_cell) = writers, readers
        low, high = (np.searchsorted(w_cell, r_cell, side=s) for s in ("left", "right"))
        count = high - low
        if self._are_too_many(int(count.sum()), "pairs of accesses to a common cell"):
            return []
        reader = np.repeat(np.arange(len(r_cell)), count)
        writer = np.repeat(low, count) + _offsets(count)
        w, r = w_row[writer], r_row[reader]
        other = self.block[w] != self.block[r]
        w, r = w[other], r[other]
        key = np.stack([self.block[w], self.segment[w], self.block[r], self.segment[r]], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        return list(zip(w[first].tolist(), r[first].tolist(), strict=True))


def _divide_axis(low: np.ndarray, high: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Divide an axis at the bounds of all boxes.

    Return the number of bounds, and for each box its first part and its number of parts.
    """
    bounds = np.unique(np.concatenate([low, high]))
    first, last = np.searchsorted(bounds, low), np.searchsorted(bounds, high)
    return len(bounds), first, np.maximum(last - first, 0)


def _offsets(count: np.ndarray) -> np.ndarray:
    """Return the concatenation of ``range(n)`` for each ``n`` of ``count``."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
