"""The last access to each element, and those before it that it was not ordered after."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .memory import Access, Memory


class Trail:
    """Events by element of one tensor: all those that a later access must still be ordered after.

    Most elements have one; others (several readers, several atomic additions) go to a list.
    """

    def __init__(self, memory: Memory, shape: tuple) -> None:
        self.memory, self.shape = memory, shape
        self._others = np.zeros((2, 0), np.int64)
        """Flat element, event."""

    @cached_property
    def last(self) -> np.ndarray:
        return np.zeros(self.shape, np.int32)

    @cached_property
    def flat(self) -> np.ndarray:
        return np.arange(int(np.prod(self.shape)), dtype=np.int64).reshape(self.shape)

    def unordered(self, key: Any, access: Access) -> tuple[int, tuple] | None:
        """An event in the region that nothing orders before ``access``, and where."""
        events = np.asarray(self.last[key])
        bad = self._unordered(events, access)
        if bad is not None:
            at = int(np.flatnonzero(np.broadcast_to(bad, events.shape))[0])
            element = int(np.asarray(self.flat[key]).flat[at])
            return int(events.flat[at]), self._index(element)
        if self._others.shape[1]:
            inside = np.isin(self._others[0], self.flat[key])
            elements, events = self._others[:, inside]
            bad = self._unordered(events, access)
            if bad is not None:
                at = int(np.flatnonzero(bad)[0])
                return int(events[at]), self._index(int(elements[at]))
        return None

    def note(self, key: Any, event: int, access: Access) -> None:
        """The access is the last one of its region."""
        log = self.memory.events
        if self._others.shape[1]:
            # What is ordered before this access need not be remembered beside it.
            elements, others = self._others
            before = access.view.covers(log.agent[others], log.time[others])
            if before.any():
                self._others = self._others[:, ~(before & np.isin(elements, self.flat[key]))]
        previous = np.asarray(self.last[key])
        if previous.size > 1 and (previous == previous.flat[0]).all():
            previous = previous.flat[0]
        apart = ~np.asarray(access.view.covers(log.agent[previous], log.time[previous]))
        if np.any(apart):
            elements = np.asarray(self.flat[key])
            apart = np.broadcast_to(apart, elements.shape)
            events = np.broadcast_to(previous, elements.shape)[apart]
            displaced = np.stack([elements[apart], events.astype(np.int64)])
            self._others = np.concatenate([self._others, displaced], axis=1)
        self.last[key] = event

    def clear(self, key: Any) -> None:
        """A write ended what the reads of its region meant."""
        if "last" in self.__dict__:
            self.last[key] = 0
        if self._others.shape[1]:
            self._others = self._others[:, ~np.isin(self._others[0], self.flat[key])]

    def _unordered(self, events: np.ndarray, access: Access) -> np.ndarray | None:
        log = self.memory.events
        if events.size > 1 and (events == events.flat[0]).all():
            events = events.flat[0]
        bad = ~np.asarray(access.view.covers(log.agent[events], log.time[events]))
        if not bad.any():
            return None
        if access.scope:
            bad = bad & ~self.memory.compatible(events, access)
        return bad if bad.any() else None

    def _index(self, element: int) -> tuple:
        return tuple(int(i) for i in np.unravel_index(element, self.shape))


def text_of_region(key: Any) -> str:
    """``[1, 0:64]`` of a NumPy index."""

    def one(part: Any) -> str:
        if isinstance(part, slice):
            return f"{part.start}:{part.stop}"
        part = np.asarray(part)
        if part.size == 1:
            return str(int(part.flat[0]))
        return f"{int(part.min())}..{int(part.max())}" if part.size else "none"

    return "" if key is None else f"[{', '.join(one(p) for p in key)}]"
