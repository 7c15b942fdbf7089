"""Packed rows: each row of each rank is written by one rank in a launch, or padding."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report.errors import SimulationError
from .row_launches import RowLaunches

if TYPE_CHECKING:
    from .memory import Access, Tensor

_PADDED_AND_WRITTEN = "is written and padded in one launch"


class PackedRows(RowLaunches):
    """Rows that the launches of all ranks write, or pad.

    Args:
        segment: shape of the rows of a rank, rows first.
        tile: rows of a tile. A read of one of them waits for all.
    """

    def __init__(self, tensor: Tensor, segment: tuple[int, ...], tile: int) -> None:
        super().__init__(tensor, segment)
        self._tile = tile
        self._read = np.zeros((*self._leading, self.capacity), np.int32)
        """Launch that last read the tile of each row, counted from 1."""
        self._padded = np.zeros((*self._leading, self.capacity), np.int32)
        """Launch that last padded each row, counted from 1."""
        self._pads: dict[int, str] = {}
        """Text of the last padding in each copy, by its first axis."""
        self._arrived: dict[tuple[int, int], int] = {}
        """Elements that are written or padded, by copy and launch."""

    def pad(self, copy: tuple[int, ...], first: int, count: int, access: Access, text: str) -> None:
        """Note that rows are padding.

        Args:
            copy: indices before the row.
            first, count: range of rows.

        Raises:
            SimulationError: ``race``: the launch has written one of the rows, or padded it.
        """
        launch, rows = self._launch_of(access), slice(first, first + count)
        written = np.any((self._launch[copy][rows] == launch).reshape(count, self.row), axis=1)
        padded = self._padded[copy][rows] == launch
        if padded.any():
            row = first + int(np.argmax(padded))
            lines = self._pads[copy[0]], text
            raise self._fault(copy[0], row, "is padded twice in a launch", lines)
        if written.any():
            row = first + int(np.argmax(written))
            event = int(self._tensor.writes.last[(*copy, row)].flat[0])
            lines = text, self._tensor.memory.describe(event)
            raise self._fault(copy[0], row, _PADDED_AND_WRITTEN, lines, event)
        self._padded[copy][rows] = launch
        self._pads[copy[0]] = text
        self._add(copy[0], launch, count * self.row)

    def refuse_second_write(self, key: Any, access: Access) -> None:
        super().refuse_second_write(key, access)
        rows = np.unique(np.asarray(self._tensor.flat[key]) // self.row)
        padded = self._padded.flat[rows] == self._launch_of(access)
        if padded.any():
            first = int(rows[int(np.argmax(padded))])
            *copy, row = (int(i) for i in np.unravel_index(first, self._padded.shape))
            place = self._tensor.memory.place(access.agent)
            text = f"{access.op} by {place} in launch {access.epoch} --> {access.loc}"
            raise self._fault(copy[0], row, _PADDED_AND_WRITTEN, (self._pads[copy[0]], text))

    def stale(self, key: Any, access: Access, poison: Any) -> Any:
        """Note the tiles that are read, and return the same as the base class."""
        rows = np.unique(np.asarray(self._tensor.flat[key]) // self.row)
        launches = self._read.reshape(-1, self.capacity)
        for copy, row in {divmod(int(n), self.capacity) for n in rows}:
            first = row // self._tile * self._tile
            launches[copy, first : first + self._tile] = self._launch_of(access)
        return super().stale(key, access, poison)

    def _count(self, elements: np.ndarray, access: Access, event: int) -> None:
        launch = self._launch_of(access)
        sizes = np.bincount(elements // (self._launch.size // len(self._launch)))
        for copy in np.flatnonzero(sizes):
            self._add(int(copy), launch, int(sizes[copy]))

    def _check_end(self, rank: int) -> None:
        """Check all copies if ``rank`` is the last one that ends its launch."""
        launch, others = 1 + self._launches.get(rank, 0), set(self._tensor.ranks) - {rank}
        if any(self._launches.get(other, 0) < launch for other in others):
            return
        for copy in range(len(self._tensor.ranks)):
            if self._arrived.pop((copy, launch), 0) != self.capacity * self.row:
                raise SimulationError("arrival", self._text(copy, launch))
            self._require_reads(copy, launch)

    def _require_reads(self, copy: int, launch: int) -> None:
        """Require that the owner waits for every written row. Otherwise a write of this launch may
        be later than one of the next launch, by another rank."""
        written = np.any(self._launch[copy].reshape(-1, self.capacity, self.row) == launch, axis=2)
        is_unread = written & (self._read[copy].reshape(-1, self.capacity) < launch)
        if is_unread.any():
            row = int(np.flatnonzero(is_unread.any(axis=0))[0])
            raise SimulationError(
                "arrival",
                f"{self._tensor.name}[{copy}], row {row} is written in launch {launch - 1}, and "
                "the owner reads no row of its tile; expected a read of each tile with rows",
            )

    def missing(self, starting: Container[int]) -> str:
        if any(rank in starting for rank in self._tensor.ranks):
            return ""
        launch = 1 + min(self._launches.get(rank, 0) for rank in self._tensor.ranks)
        for copy in range(len(self._tensor.ranks)):
            if self._arrived.get((copy, launch), 0) < self.capacity * self.row:
                return self._text(copy, launch)
        return ""

    def _add(self, copy: int, launch: int, elements: int) -> None:
        self._arrived[copy, launch] = elements + self._arrived.get((copy, launch), 0)

    def _text(self, copy: int, launch: int) -> str:
        """Describe the rows of a copy that no rank has written or padded in a launch."""
        buffers = self._launch[copy].reshape(-1, self.capacity, self.row)
        padded = self._padded[copy].reshape(-1, self.capacity)
        arrived = np.all(buffers == launch, axis=2) | (padded == launch)
        used = int(np.argmax(arrived.sum(axis=1)))
        row = int(np.argmin(arrived[used]))
        return (
            f"{self._tensor.name}[{copy}]: {int(arrived[used].sum())} of {self.capacity} rows are "
            f"written or padded in launch {launch - 1}; row {row} is not\nlast padding: "
            f"{self._pads.get(copy, 'none')}"
        )

    def _fault(
        self, copy: int, row: int, problem: str, lines: Iterable[str], event: int = 0
    ) -> SimulationError:
        place = f"{self._tensor.name}[{copy}], row {row}"
        return SimulationError("race", "\n".join([f"{place} {problem}", *lines]), event=event)
