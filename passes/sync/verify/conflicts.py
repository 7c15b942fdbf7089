"""Which writes and reads of symmetric tensors meet in an element."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .events import DATA, Event
from .happens_before import Place, Timeline
from .launches import LeftOut, Rows

_MOST = 1 << 22
"""Cells, and pairs of accesses, of one tensor that are looked at."""


@dataclass(frozen=True, eq=False)
class Touch:
    """One access by one block."""

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

    write: Touch
    read: Touch


def conflicts(timeline: Timeline, world_size: int) -> tuple[list[Conflict], list[LeftOut]]:
    """All pairs that need an order, those of one launch first; of those that have the same
    operations before and behind them only one. And the tensors of which there is too much."""
    by_tensor: dict[str, list[Rows]] = defaultdict(list)
    synced = np.sort(np.concatenate(
        [timeline.position[r] for r in timeline.rows if r.event.kind not in DATA]
        or [np.zeros(0, np.int64)]
    ))  # fmt: skip
    for rows in timeline.rows:
        if rows.event.kind in DATA:
            by_tensor[rows.event.tensor.name].append(rows)
    found: list[tuple[int, Conflict]] = []
    left_out: list[LeftOut] = []
    for rows in by_tensor.values():
        touches = _Touches(timeline, rows, world_size, synced)
        for write, read in touches.pairs():
            later = abs(write.launch - read.launch)
            found.append((later, Conflict(write, read)))
        left_out += touches.left_out
    found.sort(key=lambda c: c[0])
    return [conflict for _, conflict in found], left_out


class _Touches:
    """The accesses to one tensor in flat arrays."""

    def __init__(
        self, timeline: Timeline, rows: list[Rows], world_size: int, synced: np.ndarray
    ) -> None:
        self._timeline, self._rows = timeline, rows
        self.left_out: list[LeftOut] = []
        axes = len(rows[0].low)

        def joined(of) -> np.ndarray:
            return np.concatenate([of(r) for r in rows])

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

    def pairs(self) -> Iterator[tuple[Touch, Touch]]:
        row, cell = self._cells()
        reads = self.reads[row]
        readers = self._distinct(row[reads], cell[reads])
        writers = self._distinct(row[~reads], cell[~reads])
        meetings = self._meetings(writers, readers)
        met = sorted({row for pair in meetings for row in pair})
        columns = (self.source, self.launch, self.rank, self.number, self.block, self.position)
        each = zip(*(c[met].tolist() for c in columns), strict=True)
        touches = {
            row: Touch(self._rows[source].event, *values)
            for row, (source, *values) in zip(met, each, strict=True)
        }
        for w, r in meetings:
            yield touches[w], touches[r]

    def _are_too_many(self, count: int, unit: str) -> bool:
        if count > _MOST:
            what = f"{unit} in the launches looked at"
            self.left_out.append(LeftOut(self._rows[0].event, count, _MOST, what))
        return count > _MOST

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """(row, number of a cell that no access divides), of all rows; none if there are many."""
        rows = np.flatnonzero(self._inside)
        low, high = np.maximum(self.low[rows], 0), self.high[rows]
        axes = [_cut(low[:, axis], high[:, axis]) for axis in range(low.shape[1])]
        total = math.prod(count for _, _, count in axes).sum()
        if self._are_too_many(int(total), "cells that its accesses divide"):
            return rows[:0], rows[:0]
        at, number = np.arange(rows.size), np.zeros(rows.size, np.int64)
        for bounds, first, count in axes:
            first, count = first[at], count[at]
            at, offset = np.repeat(at, count), _offsets(count)
            number = np.repeat(number, count) * bounds + np.repeat(first, count) + offset
        return rows[at], number

    def _distinct(self, row: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One row for all that touch a cell between the same operations of the same block."""
        key = np.stack([cell, self.block[row], self.segment[row]], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        return row[first], cell[first]

    def _meetings(self, writers, readers) -> list[tuple[int, int]]:
        (w_row, w_cell), (r_row, r_cell) = writers, readers
        low, high = (np.searchsorted(w_cell, r_cell, side=s) for s in ("left", "right"))
        count = high - low
        if self._are_too_many(int(count.sum()), "pairs of accesses that meet"):
            return []
        reader = np.repeat(np.arange(len(r_cell)), count)
        writer = np.repeat(low, count) + _offsets(count)
        w, r = w_row[writer], r_row[reader]
        other = self.block[w] != self.block[r]
        w, r = w[other], r[other]
        key = np.stack([self.block[w], self.segment[w], self.block[r], self.segment[r]], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        return list(zip(w[first].tolist(), r[first].tolist(), strict=True))


def _cut(low: np.ndarray, high: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """How many places cut an axis, and of each box the first of its parts and their number."""
    bounds = np.unique(np.concatenate([low, high]))
    first, last = np.searchsorted(bounds, low), np.searchsorted(bounds, high)
    return len(bounds), first, np.maximum(last - first, 0)


def _offsets(count: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each number, one after another."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
