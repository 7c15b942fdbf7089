"""Rows of a ragged tensor: each row is written once, and their number equals the announcement."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..report.errors import SimulationError
from .shadow import text_of_region

if TYPE_CHECKING:
    from .memory import Access, Tensor

Place = tuple[int, ...]
"""Segment of a launch: storing rank, axes of the program, source."""


class Announcement(NamedTuple):
    """Number of rows that were announced, and the text of the announcement."""

    rows: int
    text: str


class Segments:
    """Rows that the current launch of each rank announces and writes to its segments.

    Launches are counted by rank. A row that an earlier launch wrote is uninitialized in the current
    one.

    Args:
        segments: extents of the axes that select a segment of a rank.
        segment: shape of a segment, rows first.
    """

    def __init__(self, tensor: Tensor, segments: tuple[int, ...], segment: tuple[int, ...]) -> None:
        self.capacity, self.row = segment[0], math.prod(segment[1:])
        self._tensor = tensor
        self._launch = np.zeros(tensor.shape, np.int32)
        """Launch of the rank that last wrote each element, counted from 1."""
        self._launches: dict[int, int] = {}
        """Number of launches that each rank has ended."""
        self._leading = tensor.shape[: len(tensor.shape) - len(segment)]
        """Extents of the axes before the rows."""
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

    def refuse_second_write(self, key: Any, access: Access) -> None:
        """Refuse a write of an element that the same launch has written before.

        Raises:
            SimulationError: ``race``, whether or not the two writes are ordered.
        """
        memory, tensor = self._tensor.memory, self._tensor
        elements = np.asarray(tensor.flat[key]).ravel()
        again = self._launch.flat[elements] == self._launch_of(access)
        if again.any():
            first = int(elements[int(np.argmax(again))])
            before = int(tensor.writes.last.flat[first])
            index = [int(i) for i in np.unravel_index(first, tensor.shape)]
            raise SimulationError(
                "race",
                f"{access.op} of {tensor.name}{text_of_region(key)} by "
                f"{memory.place(access.agent)} in launch {access.epoch} --> {access.loc}\n"
                "writes a row that the same launch has written before:\n"
                f"{memory.describe(before)}\nfirst at {tensor.name}{index}",
                event=before,
            )

    def note(self, key: Any, access: Access, event: int) -> None:
        """Note a write, and count its elements, which the source of their segment writes.

        Raises:
            SimulationError: ``arrival``: a row is above the announced number.
        """
        elements = np.asarray(self._tensor.flat[key]).ravel()
        self._launch.flat[elements] = self._launch_of(access)
        size = self.capacity * self.row
        for number in np.unique(elements // size):
            place = self._place(int(number))
            inside = elements[elements // size == number] % size
            self._written[place] = self._written.get(place, 0) + len(inside)
            last = int(inside.max()) // self.row
            if last >= self._last.get(place, (0, 0))[0]:
                self._last[place] = last, event
            self._require_below(place)

    def stale(self, key: Any, access: Access, poison: Any) -> Any:
        """Return ``poison`` together with the elements that no rank has written in this launch."""
        stale = self._launch[key] != self._launch_of(access)
        if not np.any(stale):
            return poison
        return stale if poison is None else stale | poison

    def end_launch(self, rank: int) -> None:
        """Check the segments whose source is ``rank``, and begin its next launch.

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
        self._launches[rank] = 1 + self._launches.get(rank, 0)

    def missing(self, starting: Container[int]) -> str:
        """Describe a segment with fewer rows than were announced, or return "".

        Args:
            starting: ranks with blocks that have not started; these may write more rows.
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

    def _launch_of(self, access: Access) -> int:
        """Return the number of the launch of an access, on its rank."""
        rank = int(self._tensor.memory.layout.place(access.agent)[0])
        return 1 + self._launches.get(rank, 0)

    def _place(self, number: int) -> Place:
        """Return the segment with this number, without the index of its buffer."""
        index = [int(i) for i in np.unravel_index(number, self._leading)]
        return index[0], *index[len(index) - self._axes :]

    def _name(self, place: Place) -> str:
        return f"{self._tensor.name}[{', '.join(map(str, place))}]"
