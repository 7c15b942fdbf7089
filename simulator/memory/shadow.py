"""Shadow memory: the last access to each element, and earlier accesses unordered with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .order import GPU, SYS

if TYPE_CHECKING:
    from .memory import Access, Memory


_FEW = 32
"""Largest number of elements of a region that is recorded element by element."""
_SINGLY = 8
"""Number of events from which their order is looked up in arrays."""


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


class WordRecord:
    """Further events of one element, which a later access must be ordered after.

    Attributes:
        events: number, in the order in which they were added, and event.
        scope: no event has a narrower scope.
        ranks: all events are of these ranks.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.scope, self.ranks = SYS, set[int]()

    def add(self, number: int, event: int, memory: Memory) -> None:
        self.events.append((number, event))
        self.scope = min(self.scope, memory.events.scope.item(event))
        self.ranks.add(memory.layout.place(memory.events.agent.item(event))[0])

    def is_compatible(self, access: Access, memory: Memory) -> bool:
        """Return whether the access and all events are atomic at scopes that include each other.
        If this is False, they may still be."""
        rank = memory.layout.place(access.agent)[0]
        return min(self.scope, access.scope) >= (GPU if self.ranks == {rank} else SYS)


class ShadowMemory:
    """Events by element of one tensor that a later access must be ordered after.

    Most elements have one event. Further ones (several readers, several atomic additions) are
    stored in lists. Accesses of one element have a list of their own, which a region joins to the
    others.
    """

    def __init__(self, memory: Memory, shape: tuple) -> None:
        self.memory, self.shape = memory, shape
        self._others = np.zeros((2, 0), np.int64)
        """Two rows: flat index of the element, and event."""
        self._others_of: dict[int, WordRecord] = {}
        """Further events since the last access of a region, by element."""
        self._count = 0
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
        if "last" not in self.__dict__:
            return None
        element = self.element_at(key)
        if element is not None:
            return self._unordered_at(element, access)
        self._join_others()
        events = self._last_of(key)
        bad = self._unordered(events, access)
        if bad is not None:
            at = int(np.flatnonzero(bad)[0])
            element = int(np.asarray(self.flat[key]).flat[at])
            return int(np.asarray(events).flat[at]), self._index(element)
        if self._others.shape[1]:
            elements, events = self._others[:, _inside(self._others[0], self._region(key))]
            bad = self._unordered(events, access)
            if bad is not None:
                position = int(np.flatnonzero(bad)[0])
                return int(events[position]), self._index(int(elements[position]))
        for record in self._overlapping(key):
            if self._unordered(record.event, access) is not None:
                common = record.elements[record.common(self._region(key))]
                if common.size:
                    return record.event, self._index(int(common[0]))
        return None

    def are_earlier(self, elements: np.ndarray, accesses: Sequence[Access]) -> bool:
        """Return whether all events of these elements are of launches before the accesses, which
        are ordered after them."""
        if "last" not in self.__dict__:
            return True
        if self._others.shape[1] or self._others_of or self._records:
            return False
        events = self.last.reshape(-1)[elements]
        return not events.any() or all(
            self.memory.epoch_of(event) < access.epoch and self._before(event, access)
            for event in np.unique(events).tolist()
            for access in accesses
        )

    def _unordered_at(self, element: int, access: Access) -> tuple[int, tuple] | None:
        """Do what ``unordered`` does, for one element."""
        events = [self.last.item(element)]
        if self._others.shape[1]:
            events += self._others[1, self._others[0] == element].tolist()
        record = self._others_of.get(element)
        if record is not None and not record.is_compatible(access, self.memory):
            events += [event for _, event in record.events]
        events += [record.event for record in self._records_at(element)]
        for event in events:
            if self._unordered(event, access) is not None:
                return event, self._index(element)
        return None

    def note(self, key: Any, event: int, access: Access) -> None:
        """Record the access as the last one of its region."""
        # Events ordered before this access are dropped: order is transitive.
        element = self.element_at(key)
        if element is not None:
            self._note_at(element, event, access)
            return
        self._join_others()
        if self._others.shape[1]:
            self._drop_others(self._region(key), access)
        self._remove(self._region(key) if self._records else None, [
            record for record in self._overlapping(key) if self._before(record.event, access)
        ])  # fmt: skip
        previous = self._last_of(key)
        ordered = self._before(previous, access)
        if ordered is not True and not np.all(ordered):
            unordered = np.logical_not(ordered)
            elements = np.asarray(self.flat[key])
            if unordered.ndim == 0 and elements.size > _FEW:
                self._records.append(RangeRecord(previous, self._region(key)))
            else:
                unordered = np.broadcast_to(unordered, elements.shape)
                events = np.broadcast_to(previous, elements.shape)[unordered]
                displaced = np.stack([elements[unordered], events.astype(np.int64)])
                self._others = np.concatenate([self._others, displaced], axis=1)
        self.last[key] = event

    def _note_at(self, element: int, event: int, access: Access) -> None:
        """Do what ``note`` does, for one element."""
        previous = self.last.item(element)
        self._drop_at(element, access)
        if not self._before(previous, access):
            self._count += 1
            record = self._others_of.get(element)
            if record is None:
                record = self._others_of[element] = WordRecord()
            record.add(self._count, previous, self.memory)
        self.last.flat[element] = event

    def clear(self, key: Any, access: Access) -> None:
        """Drop the reads of a region that is written. An atomic write drops only reads ordered
        before it, because a later plain write may still race with the others."""
        if "last" not in self.__dict__:
            return
        element = self.element_at(key)
        if element is not None:
            last, ordered = self.last.item(element), access if access.scope else None
            if last and (ordered is None or self._before(last, access)):
                self.last.flat[element] = 0
            self._drop_at(element, ordered)
            return
        self._join_others()
        events = self._last_of(key) if access.scope else 0
        kept = isinstance(events, np.ndarray) or events != 0
        self.last[key] = np.where(self._before(events, access), 0, events) if kept else 0
        if self._others.shape[1]:
            self._drop_others(self._region(key), access if access.scope else None)
        self._remove(self._region(key) if self._records else None, [
            record for record in self._overlapping(key)
            if not access.scope or self._before(record.event, access)
        ])  # fmt: skip

    def _last_of(self, key: Any) -> int | np.ndarray:
        """Return the last event of each element, or one number if all have the same."""
        events = self.last[key]
        if not isinstance(events, np.ndarray):
            return int(events)
        if not events.size:
            return events
        first = events.item(0)
        return first if (events == first).all() else events

    def element_at(self, key: Any) -> int | None:
        """Return the flat index of the element at ``key``, or None if that is a region."""
        element = 0
        if len(key) != len(self.shape):
            return None
        for part, extent in zip(key, self.shape, strict=True):
            if type(part) is not int:
                if not isinstance(part, (int, np.integer)):
                    return None
                part = int(part)
            element = element * extent + part
        return element

    def _records_at(self, element: int) -> list[RangeRecord]:
        """Return the records that have this element."""
        if not self._records:
            return []
        region = np.array([element])
        return [r for r in self._records if r.may_overlap(region) and r.common(region).any()]

    def _drop_at(self, element: int, access: Access | None) -> None:
        """Drop the further events of an element, only those ordered before ``access`` if given."""
        record = self._others_of.get(element)
        if record is not None:
            kept = []
            if access is not None and len(record.events) < _SINGLY:
                kept = [pair for pair in record.events if not self._before(pair[1], access)]
            elif access is not None:
                before = self._before(np.array([event for _, event in record.events]), access)
                pairs = zip(record.events, before.tolist(), strict=True)
                kept = [event for event, drop in pairs if not drop]
            if kept:
                record.events = kept
            else:
                del self._others_of[element]
        if self._others.shape[1]:
            self._drop_others(np.array([element]), access)
        if self._records:
            self._remove(np.array([element]), [
                record for record in self._records_at(element)
                if access is None or self._before(record.event, access)
            ])  # fmt: skip

    def _join_others(self) -> None:
        """Move the further events of single elements to the others."""
        if self._others_of:
            events = sorted((n, i, e) for i, r in self._others_of.items() for n, e in r.events)
            moved = np.array([(i, e) for _, i, e in events], np.int64).reshape(-1, 2).T
            self._others = np.concatenate([self._others, moved], axis=1)
            self._others_of = {}

    def _drop_others(self, region: np.ndarray, access: Access | None) -> None:
        """Drop the further events of a region, only those ordered before ``access`` if given."""
        inside = _inside(self._others[0], region)
        if not inside.any():
            return
        if access is not None:
            inside[inside] = self._before(self._others[1, inside], access)
        self._others = self._others[:, ~inside]

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

    def _remove(self, region: Any, records: list[RangeRecord]) -> None:
        """Remove the region from these records."""
        if not records:
            return
        remaining = []
        for record in records:
            elements = record.elements[~record.common(region)]
            if elements.size:
                remaining.append(RangeRecord(record.event, elements))
        removed = {id(record) for record in records}
        self._records = [r for r in self._records if id(r) not in removed] + remaining

    def _before(self, events: Any, access: Access) -> Any:
        """Return whether events happen before the access: of one event, or of each of an array."""
        log, covers = self.memory.events, access.view.covers
        if isinstance(events, int):
            return covers(log.agent.item(events), log.time.item(events))
        if events.size < _SINGLY:
            ordered = [covers(log.agent.item(e), log.time.item(e)) for e in events.flat]
            return np.array(ordered, np.bool_).reshape(events.shape)
        return covers(log.agent[events], log.time[events])

    def _unordered(self, events: Any, access: Access) -> np.ndarray | None:
        ordered = self._before(events, access)
        if ordered is True or (access.scope and self.memory.compatible(events, access) is True):
            return None
        bad = np.logical_not(ordered)
        if not bad.any():
            return None
        if access.scope:
            bad = bad & np.logical_not(self.memory.compatible(events, access))
        if access.accessed is not None:
            bad = bad & ~np.isin(events, access.threads.events())  # see ThreadRecord
        return bad if bad.any() else None

    def _index(self, element: int) -> tuple:
        return tuple(int(i) for i in np.unravel_index(element, self.shape))


def _inside(elements: np.ndarray, region: np.ndarray) -> np.ndarray:
    """Return a mask of the elements that are in a region of ascending indices."""
    if region.size == 1:
        return elements == region[0]
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
