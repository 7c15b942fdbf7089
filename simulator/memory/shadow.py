"""Shadow memory: the last access to each element, and earlier accesses unordered with it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .memory import Access, Memory


_FEW = 32
"""Largest number of elements of a region that is recorded element by element."""


class RangeRecord(NamedTuple):
    """Elements that an event accessed before their last event, without an order between the two."""

    event: int
    elements: np.ndarray
    """Flat indices, ascending."""

    def may_overlap(self, region: np.ndarray) -> bool:
        """Return whether the elements may overlap this region."""
        return self.elements[0] <= region[-1] and region[0] <= self.elements[-1]

    def common(self, region: np.ndarray) -> np.ndarray:
        """Return a mask of the elements that are in the region."""
        if self.elements.shape == region.shape and (self.elements == region).all():
            return np.ones(region.shape, np.bool_)
        return _inside(self.elements, region)


class ShadowMemory:
    """Events by element of one tensor that a later access must be ordered after.

    Most elements have one event. Further ones (several readers, several atomic additions) are
    stored in lists.
    """

    def __init__(self, memory: Memory, shape: tuple) -> None:
        self.memory, self.shape = memory, shape
        self._others = np.zeros((2, 0), np.int64)
        """Two rows: flat index of the element, and event."""
        self._records: list[RangeRecord] = []
        """Further events that have many elements."""

    @cached_property
    def last(self) -> np.ndarray:
        return np.zeros(self.shape, np.int32)

    @cached_property
    def flat(self) -> np.ndarray:
        return np.arange(int(np.prod(self.shape)), dtype=np.int64).reshape(self.shape)

    def unordered(self, key: Any, access: Access) -> tuple[int, tuple] | None:
        """Return an event in the region that is not ordered before ``access``, and its element."""
        events = np.asarray(self.last[key])
        bad = self._unordered(events, access)
        if bad is not None:
            position = int(np.flatnonzero(np.broadcast_to(bad, events.shape))[0])
            element = int(np.asarray(self.flat[key]).flat[position])
            return int(events.flat[position]), self._index(element)
        if self._others.shape[1]:
            elements, events = self._others[:, _inside(self._others[0], self._region(key))]
            bad = self._unordered(events, access)
            if bad is not None:
                position = int(np.flatnonzero(bad)[0])
                return int(events[position]), self._index(int(elements[position]))
        for record in self._overlapping(key):
            if self._unordered(np.asarray(record.event), access) is not None:
                common = record.elements[record.common(self._region(key))]
                if common.size:
                    return record.event, self._index(int(common[0]))
        return None

    def note(self, key: Any, event: int, access: Access) -> None:
        """Record the access as the last one of its region."""
        # Events ordered before this access are dropped: order is transitive.
        if self._others.shape[1]:
            elements, others = self._others
            before = self._before(others, access)
            if before.any():
                self._others = self._others[:, ~(before & _inside(elements, self._region(key)))]
        self._remove(key, [
            record for record in self._overlapping(key)
            if self._before(np.asarray(record.event), access)
        ])  # fmt: skip
        previous = np.asarray(self.last[key])
        if previous.size > 1 and (previous == previous.flat[0]).all():
            previous = previous.flat[0]
        unordered = ~np.asarray(self._before(previous, access))
        if np.any(unordered):
            elements = np.asarray(self.flat[key])
            if unordered.ndim == 0 and elements.size > _FEW:
                self._records.append(RangeRecord(int(previous), self._region(key)))
            else:
                unordered = np.broadcast_to(unordered, elements.shape)
                events = np.broadcast_to(previous, elements.shape)[unordered]
                displaced = np.stack([elements[unordered], events.astype(np.int64)])
                self._others = np.concatenate([self._others, displaced], axis=1)
        self.last[key] = event

    def clear(self, key: Any, access: Access) -> None:
        """Drop the reads of a region that is written. An atomic write drops only reads ordered
        before it, because a later plain write may still race with the others."""
        if "last" in self.__dict__:
            events = np.asarray(self.last[key])
            if not access.scope or not events.any():
                self.last[key] = 0
            else:
                self.last[key] = np.where(self._before(events, access), 0, events)
        if self._others.shape[1]:
            in_region = _inside(self._others[0], self._region(key))
            if access.scope:
                in_region &= self._before(self._others[1], access)
            self._others = self._others[:, ~in_region]
        self._remove(key, [
            record for record in self._overlapping(key)
            if not access.scope or self._before(np.asarray(record.event), access)
        ])  # fmt: skip

    def _region(self, key: Any) -> np.ndarray:
        """Return the flat indices of a region, ascending."""
        elements = np.asarray(self.flat[key]).ravel()
        basic = not any(isinstance(part, np.ndarray) for part in key)
        return elements if basic else np.unique(elements)

    def _overlapping(self, key: Any) -> list[RangeRecord]:
        """Return the records that may have elements in the region."""
        if not self._records:
            return []
        region = self._region(key)
        return (
            [record for record in self._records if record.may_overlap(region)]
            if region.size
            else []
        )

    def _remove(self, key: Any, records: list[RangeRecord]) -> None:
        """Remove the region from these records."""
        if not records:
            return
        region, remaining = self._region(key), []
        for record in records:
            elements = record.elements[~record.common(region)]
            if elements.size:
                remaining.append(RangeRecord(record.event, elements))
        removed = {id(record) for record in records}
        self._records = [r for r in self._records if id(r) not in removed] + remaining

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
    """Return a mask of the elements that are in a region of ascending indices."""
    return np.searchsorted(region, elements) < np.searchsorted(region, elements, "right")


def text_of_region(key: Any) -> str:
    """Format a NumPy index: ``[1, 0:64]``."""

    def text_of_axis(part: Any) -> str:
        if isinstance(part, slice):
            return f"{part.start}:{part.stop}"
        part = np.asarray(part)
        if part.size == 1:
            return str(int(part.flat[0]))
        return f"{int(part.min())}..{int(part.max())}" if part.size else "none"

    return "" if key is None else f"[{', '.join(text_of_axis(p) for p in key)}]"
