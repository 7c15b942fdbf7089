"""The last access to each element, and those before it that it was not ordered after."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .memory import Access, Memory


_FEW = 32
"""Elements up to which a part of a tensor is remembered element by element."""


class RangeRecord(NamedTuple):
    """Elements of which an event is not the last one, but not before it either."""

    event: int
    elements: np.ndarray
    """Flat, ascending."""

    def meets(self, region: np.ndarray) -> bool:
        """Whether it can have an element of this region in common with it."""
        return self.elements[0] <= region[-1] and region[0] <= self.elements[-1]

    def common(self, region: np.ndarray) -> np.ndarray:
        """Which of its elements are in the region."""
        if self.elements.shape == region.shape and (self.elements == region).all():
            return np.ones(region.shape, np.bool_)
        return _inside(self.elements, region)


class ShadowMemory:
    """Events by element of one tensor: all those that a later access must still be ordered after.

    Most elements have one; others (several readers, several atomic additions) go to a list.
    """

    def __init__(self, memory: Memory, shape: tuple) -> None:
        self.memory, self.shape = memory, shape
        self._others = np.zeros((2, 0), np.int64)
        """Flat element, event."""
        self._rests: list[RangeRecord] = []
        """The same where one event has many elements."""

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
            elements, events = self._others[:, _inside(self._others[0], self._region(key))]
            bad = self._unordered(events, access)
            if bad is not None:
                at = int(np.flatnonzero(bad)[0])
                return int(events[at]), self._index(int(elements[at]))
        for rest in self._meeting(key):
            if self._unordered(np.asarray(rest.event), access) is not None:
                found = rest.elements[rest.common(self._region(key))]
                if found.size:
                    return rest.event, self._index(int(found[0]))
        return None

    def note(self, key: Any, event: int, access: Access) -> None:
        """The access is the last one of its region."""
        # What is ordered before this access need not be remembered beside it.
        if self._others.shape[1]:
            elements, others = self._others
            before = self._before(others, access)
            if before.any():
                self._others = self._others[:, ~(before & _inside(elements, self._region(key)))]
        self._forget(key, [
            rest for rest in self._meeting(key) if self._before(np.asarray(rest.event), access)
        ])  # fmt: skip
        previous = np.asarray(self.last[key])
        if previous.size > 1 and (previous == previous.flat[0]).all():
            previous = previous.flat[0]
        apart = ~np.asarray(self._before(previous, access))
        if np.any(apart):
            elements = np.asarray(self.flat[key])
            if apart.ndim == 0 and elements.size > _FEW:
                self._rests.append(RangeRecord(int(previous), self._region(key)))
            else:
                apart = np.broadcast_to(apart, elements.shape)
                events = np.broadcast_to(previous, elements.shape)[apart]
                displaced = np.stack([elements[apart], events.astype(np.int64)])
                self._others = np.concatenate([self._others, displaced], axis=1)
        self.last[key] = event

    def clear(self, key: Any, access: Access) -> None:
        """A write ended what the reads of its region meant; an atomic one only of those before it:
        a later plain one may still race with the others."""
        if "last" in self.__dict__:
            events = np.asarray(self.last[key])
            if not access.scope or not events.any():
                self.last[key] = 0
            else:
                self.last[key] = np.where(self._before(events, access), 0, events)
        if self._others.shape[1]:
            inside = _inside(self._others[0], self._region(key))
            if access.scope:
                inside &= self._before(self._others[1], access)
            self._others = self._others[:, ~inside]
        self._forget(key, [
            rest for rest in self._meeting(key)
            if not access.scope or self._before(np.asarray(rest.event), access)
        ])  # fmt: skip

    def _region(self, key: Any) -> np.ndarray:
        """The flat elements of a region, ascending."""
        elements = np.asarray(self.flat[key]).ravel()
        basic = not any(isinstance(part, np.ndarray) for part in key)
        return elements if basic else np.unique(elements)

    def _meeting(self, key: Any) -> list[RangeRecord]:
        """The rests that may have elements in the region."""
        if not self._rests:
            return []
        region = self._region(key)
        return [rest for rest in self._rests if rest.meets(region)] if region.size else []

    def _forget(self, key: Any, rests: list[RangeRecord]) -> None:
        """Take the region out of these rests."""
        if not rests:
            return
        region, left = self._region(key), []
        for rest in rests:
            elements = rest.elements[~rest.common(region)]
            if elements.size:
                left.append(RangeRecord(rest.event, elements))
        gone = {id(rest) for rest in rests}
        self._rests = [rest for rest in self._rests if id(rest) not in gone] + left

    def _before(self, events: np.ndarray, access: Access) -> Any:
        log = self.memory.events
        return access.view.covers(log.agent[events], log.time[events])

    def _unordered(self, events: np.ndarray, access: Access) -> np.ndarray | None:
        if events.size > 1 and (events == events.flat[0]).all():
            events = events.flat[0]
        bad = ~np.asarray(self._before(events, access))
        if not bad.any():
            return None
        if access.scope:
            bad = bad & ~self.memory.compatible(events, access)
        if access.accessed is not None:
            bad = bad & ~np.isin(events, access.threads.events())  # see ThreadRecord
        return bad if bad.any() else None

    def _index(self, element: int) -> tuple:
        return tuple(int(i) for i in np.unravel_index(element, self.shape))


def _inside(elements: np.ndarray, region: np.ndarray) -> np.ndarray:
    """Which of these elements are in a region, which is ascending."""
    return np.searchsorted(region, elements) < np.searchsorted(region, elements, "right")


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
