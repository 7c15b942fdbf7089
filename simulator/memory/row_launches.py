"""Launch that last wrote each element of a tensor whose rows are written once in a launch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report.errors import SimulationError
from .shadow import text_of_region

if TYPE_CHECKING:
    from .memory import Access, Tensor


class RowLaunches(ABC):
    """Launch that last wrote each element of a tensor.

    Launches are counted by rank. A row that an earlier launch wrote is uninitialized in the current
    one.

    Args:
        segment: shape of the rows that are stored together, rows first.
    """

    def __init__(self, tensor: Tensor, segment: tuple[int, ...]) -> None:
        self.capacity, self.row = segment[0], math.prod(segment[1:])
        self._tensor = tensor
        self._launch = np.zeros(tensor.shape, np.int32)
        """Launch of the rank that last wrote each element, counted from 1."""
        self._launches: dict[int, int] = {}
        """Number of launches that each rank has ended."""
        self._leading = tensor.shape[: len(tensor.shape) - len(segment)]
        """Extents of the axes before the rows."""

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
        """Note a write."""
        elements = np.asarray(self._tensor.flat[key]).ravel()
        self._launch.flat[elements] = self._launch_of(access)
        self._count(elements, access, event)

    @abstractmethod
    def _count(self, elements: np.ndarray, access: Access, event: int) -> None:
        """Count written elements."""

    def stale(self, key: Any, access: Access, poison: Any) -> Any:
        """Return ``poison`` together with the elements that no rank has written in this launch."""
        stale = self._launch[key] != self._launch_of(access)
        if not np.any(stale):
            return poison
        return stale if poison is None else stale | poison

    def end_launch(self, rank: int) -> None:
        """Check what the launch of ``rank`` has written, and begin its next launch.

        Raises:
            SimulationError: ``arrival``: the launch has written another number of rows.
        """
        self._check_end(rank)
        self._launches[rank] = 1 + self._launches.get(rank, 0)

    @abstractmethod
    def _check_end(self, rank: int) -> None:
        """Check what the launch of ``rank``, which ends, has written."""

    @abstractmethod
    def missing(self, starting: Container[int]) -> str:
        """Describe rows that are not written, or return "".

        Args:
            starting: ranks with blocks that have not started; these may write more rows.
        """

    def _launch_of(self, access: Access) -> int:
        """Return the number of the launch of an access, on its rank."""
        rank = int(self._tensor.memory.layout.place(access.agent)[0])
        return 1 + self._launches.get(rank, 0)
