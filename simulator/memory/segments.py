"""Rows of a ragged tensor: each is written once in a launch, and as many as were announced."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..report.errors import SimulationError
from .row_launches import RowLaunches

if TYPE_CHECKING:
    from .memory import Access, Tensor

Place = tuple[int, ...]
"""Segment of a launch: storing rank, axes of the program, source."""


class Announcement(NamedTuple):
    """Number of rows that were announced, and the text of the announcement."""

    rows: int
    text: str


class Segments(RowLaunches):
    """Rows that the current launch of each rank announces and writes to its segments.

    Args:
        segments: extents of the axes that select a segment of a rank.
        segment: shape of a segment, rows first.
    """

    def __init__(self, tensor: Tensor, segments: tuple[int, ...], segment: tuple[int, ...]) -> None:
        super().__init__(tensor, segment)
        self._announced: dict[Place, Announcement] = {}
        self._written: dict[Place, int] = {}
        self._last: dict[Place, tuple[int, int]] = {}
        """Highest row that was written to each segment, and the event."""
        self._axes = len(segments)

    def announce(self, place: Place, rows: int, text: str) -> None:
        """Note the announcement of a segment.

        Raises:
            SimulationError: ``arrival``: the launch has announced it before, or has written a row
                above the announced number.
        """
        if place in self._announced:
            first = self._announced[place].text
            raise SimulationError(
                "arrival", f"{self._name(place)} is announced twice in a launch\n{first}\n{text}"
            )
        self._announced[place] = Announcement(rows, text)
        self._require_below(place)

    def _count(self, elements: np.ndarray, access: Access, event: int) -> None:
        """Count elements that the source of their segment writes.

        Raises:
            SimulationError: ``arrival``: a row is above the announced number.
        """
        size = self.capacity * self.row
        for number in np.unique(elements // size):
            place = self._place(int(number))
            inside = elements[elements // size == number] % size
            self._written[place] = self._written.get(place, 0) + len(inside)
            last = int(inside.max()) // self.row
            if last >= self._last.get(place, (0, 0))[0]:
                self._last[place] = last, event
            self._require_below(place)

    def _check_end(self, rank: int) -> None:
        """Check the segments whose source is ``rank``.

        Raises:
            SimulationError: ``arrival``: it has announced another number of rows than it has
                written.
        """
        source = self._tensor.ranks.index(rank)
        for place in sorted({*self._announced, *self._written}):
            if place[-1] == source:
                self._require_amount(place)
                self._announced.pop(place, None)
                self._written.pop(place, None)
                self._last.pop(place, None)

    def missing(self, starting: Container[int]) -> str:
        """Describe a segment with fewer rows than were announced, or return "".

        Args:
            starting: ranks of which blocks have not started, which may write more rows.
        """
        for place, announced in sorted(self._announced.items()):
            written = self._written.get(place, 0)
            is_starting = self._tensor.ranks[place[-1]] in starting
            if written < announced.rows * self.row and not is_starting:
                return self._text(place)
        return ""

    def _require_amount(self, place: Place) -> None:
        rows = self._announced[place].rows if place in self._announced else 0
        if self._written.get(place, 0) != rows * self.row:
            raise self._fault(place)

    def _require_below(self, place: Place) -> None:
        if place in self._announced and place in self._last:
            if self._last[place][0] >= self._announced[place].rows:
                raise self._fault(place)

    def _fault(self, place: Place) -> SimulationError:
        return SimulationError("arrival", self._text(place), event=self._last.get(place, (0, 0))[1])

    def _text(self, place: Place) -> str:
        written = self._written.get(place, 0)
        announced = self._announced.get(place, Announcement(0, "no announcement"))
        last, event = self._last.get(place, (0, 0))
        lines = [
            f"{self._name(place)}: announced rows: {announced.rows}; rows written so far: "
            f"{written / self.row:g}",
            f"announced by: {announced.text}",
        ]
        if event:
            lines.append(f"highest row, {last}, written by: {self._tensor.memory.describe(event)}")
        return "\n".join(lines)

    def _place(self, number: int) -> Place:
        """Return the segment with this number, without the index of its buffer."""
        index = [int(i) for i in np.unravel_index(number, self._leading)]
        return index[0], *index[len(index) - self._axes :]

    def _name(self, place: Place) -> str:
        return f"{self._tensor.name}[{', '.join(map(str, place))}]"
