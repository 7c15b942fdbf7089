"""Which writes and reads of symmetric tensors meet in an element."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .events import DATA, Event
from .happens_before import Place, Timeline
from .launches import Rows

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


def conflicts(timeline: Timeline, world_size: int) -> list[Conflict]:
    """All pairs that need an order, those of one launch first; of those that have the same
    operations before and behind them only one."""
    by_tensor: dict[str, list[Rows]] = defaultdict(list)
    synced = np.sort(np.concatenate(
        [timeline.position[r] for r in timeline.rows if r.event.kind not in DATA]
        or [np.zeros(0, np.int64)]
    ))  # fmt: skip
    for rows in timeline.rows:
        if rows.event.kind in DATA:
            by_tensor[rows.event.tensor.name].append(rows)
    found: list[tuple[int, Conflict]] = []
    for rows in by_tensor.values():
        touches = _Touches(timeline, rows, world_size, synced)
        for write, read in touches.pairs():
            later = abs(write.launch - read.launch)
            found.append((later, Conflict(write, read)))
    found.sort(key=lambda c: c[0])
    return [conflict for _, conflict in found]


class _Touches:
    """The accesses to one tensor in flat arrays."""

    def __init__(
        self, timeline: Timeline, rows: list[Rows], world_size: int, synced: np.ndarray
    ) -> None:
        self._timeline, self._rows = timeline, rows
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
        cells = self._cells()
        if cells is None:
            return
        row, cell = cells
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

    def _cells(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(row, number of a cell that no access divides), of all rows; None if there are many."""
        rows = np.flatnonzero(self._inside)
        low, high = self.low[rows], self.high[rows]
        if not rows.size:
            return None
        low = np.maximum(low, 0)
        number = np.zeros(rows.size, np.int64)
        total = 1
        for axis in range(low.shape[1]):
            bounds = np.unique(np.concatenate([low[:, axis], high[:, axis]]))
            first = np.searchsorted(bounds, low[:, axis])
            last = np.searchsorted(bounds, high[:, axis])
            count = np.maximum(last - first, 0)
            if int(count.sum()) > _MOST:
                return None
            rows = np.repeat(rows, count)
            offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            number = np.repeat(number, count) * len(bounds) + np.repeat(first, count) + offset
            low, high = np.repeat(low, count, axis=0), np.repeat(high, count, axis=0)
            total *= len(bounds)
        return rows, number

    def _distinct(self, row: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One row for all that touch a cell between the same operations of the same block."""
        key = np.stack([cell, self.block[row], self.segment[row]], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        return row[first], cell[first]

    def _meetings(self, writers, readers) -> list[tuple[int, int]]:
        (w_row, w_cell), (r_row, r_cell) = writers, readers
        low, high = (np.searchsorted(w_cell, r_cell, side=s) for s in ("left", "right"))
        count = high - low
        if int(count.sum()) > _MOST:
            return []
        reader = np.repeat(np.arange(len(r_cell)), count)
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        writer = np.repeat(low, count) + offset
        w, r = w_row[writer], r_row[reader]
        other = self.block[w] != self.block[r]
        w, r = w[other], r[other]
        key = np.stack([self.block[w], self.segment[w], self.block[r], self.segment[r]], axis=1)
        _, first = np.unique(key, axis=0, return_index=True)
        return list(zip(w[first].tolist(), r[first].tolist(), strict=True))
