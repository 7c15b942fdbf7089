"""Order between the threads of one block.

Clocks distinguish thread groups. Within a group, and where several groups act together, this finer
record stores which accesses to global memory happen before the next access of each thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

WARP = 32
_MAX_LATER = 64
"""Largest number of accesses that are not yet in the record of their tensor."""
_MAX_THREADS = 1024
"""Largest number of threads of a block."""
_WIDEST = 32
"""Bytes of the widest vector access of a thread."""
_MAX_GROUPS = 40
"""Largest number of thread groups. Each adds time to every access of the block."""

Threads = Callable[[np.ndarray], np.ndarray]
"""Maps points to the numbers of the threads that execute them."""


class ThreadGroupSplit(Exception):
    """Raised when a set of threads acts that is no union of thread groups: the schedule restarts.

    Attributes:
        group_of: a finer thread group of each thread of the block.
    """

    def __init__(self, group_of: np.ndarray) -> None:
        super().__init__()
        self.group_of = group_of


def cut(cuts: Iterable[int]) -> np.ndarray:
    """Return the thread group of each thread, where a new group starts at each of ``cuts``."""
    return np.searchsorted(sorted(cuts), np.arange(_MAX_THREADS), side="right") - 1


def finer(group_of: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Split the thread groups by ``parts``; number them in the order of their first threads."""
    _, first, number = np.unique(
        np.stack([group_of, parts]), axis=1, return_index=True, return_inverse=True
    )
    return np.argsort(np.argsort(first))[number.reshape(-1)]


def divide(group_of: np.ndarray, parts: np.ndarray) -> None:
    """Request thread groups split by ``parts``, unless there are too many.

    Raises:
        Divided: with these thread groups.
    """
    split = finer(group_of, parts)
    if split.max() < _MAX_GROUPS:
        raise ThreadGroupSplit(split)


def names_of(group_of: np.ndarray) -> tuple[str, ...]:
    """Return the names of the thread groups: ``thread 0``, ``threads 32, 64 to 127``."""
    last = group_of[-1]
    return tuple(
        "other threads" if i == last else _name(np.flatnonzero(group_of == i))
        for i in range(group_of.max() + 1)
    )


def _name(threads: np.ndarray) -> str:
    ends = np.flatnonzero(np.diff(threads, append=threads[-1] + 2) != 1)
    runs = [
        (int(threads[i]), int(threads[j])) for i, j in zip([0, *(ends[:-1] + 1)], ends, strict=True)
    ]
    texts = [str(low) if low == high else f"{low} to {high}" for low, high in runs]
    if len(texts) > 4:
        texts = [*texts[:3], "..", texts[-1]]
    return f"thread{'s' if len(threads) > 1 else ''} {', '.join(texts)}"


class EachThread(NamedTuple):
    """Executors of points that are thread numbers."""

    def assignments(self, itemsize: int) -> list[Threads]:
        return [lambda points: points]


EACH_THREAD = EachThread()


class ParallelLoop(NamedTuple):
    """Executors of the points of a T.Parallel.

    TileLang assigns vectors of points to the threads of the loop in turn. The vector width depends
    on all accesses of the loop, so several widths are possible.
    """

    extents: tuple[int, ...]
    first: int
    threads: int

    def assignments(self, itemsize: int) -> list[Threads]:
        return _by_vectors(self, itemsize)


@lru_cache(maxsize=4096)
def _by_vectors(loop: ParallelLoop, itemsize: int) -> list[Threads]:
    """Return the assignments for the widths that TileLang's SelectMinPaddingVectorSize chooses."""
    points, least_padding, assigned = int(np.prod(loop.extents)), None, []
    for width in (1 << n for n in range(_WIDEST.bit_length())):
        padding = -points % (loop.threads * width)
        fits = points % width == 0 and width * itemsize <= _WIDEST
        if width == 1 or (fits and padding <= least_padding):
            assigned.append(lambda p, width=width: loop.first + p // width % loop.threads)
        least_padding = padding if least_padding is None else min(least_padding, padding)
    return assigned


Executors = EachThread | ParallelLoop


class ElementAccess(NamedTuple):
    """Flat elements of a tensor, and the point that accesses each. Elements may repeat."""

    by: Executors
    elements: np.ndarray
    points: np.ndarray

    def clash(self, values: np.ndarray, itemsize: int) -> int | None:
        """Return an element to which different threads store different values, in every assignment
        of threads; None if there is none.

        Args:
            values: bits of the value that each point stores.
        """
        _, group = np.unique(self.elements, return_inverse=True)
        repeated = np.bincount(group)[group] > 1
        elements, points, stored = (a[repeated] for a in (self.elements, self.points, values))
        element = None
        for threads_of in self.by.assignments(itemsize):
            clashing = _varies(elements, threads_of(points)) & _varies(elements, stored)
            if not clashing.any():
                return None
            if element is None:
                element = int(elements[np.flatnonzero(clashing)[0]])
        return element


def clash(
    data: np.ndarray, key: tuple, values: Any, accessed: Callable[[], ElementAccess]
) -> int | None:
    """Return an element of ``data[key]``, where ``values`` were just stored, to which different
    threads have stored different values; see ``ElementAccess.clash``."""
    if not any(isinstance(part, np.ndarray) for part in key):
        return None
    stored = bits(data[key])
    intended = np.broadcast_to(bits(np.asarray(values, data.dtype)), stored.shape)
    if (stored == intended).all():
        return None
    current = accessed()
    if current.elements.size != intended.size:
        return None
    return current.clash(intended.reshape(-1), data.itemsize)


def bits(values: np.ndarray) -> np.ndarray:
    """Return the values as unsigned integers of the same bits."""
    values = np.ascontiguousarray(values)
    return values.view(f"u{values.itemsize}").reshape(values.shape)


def _varies(elements: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return a mask of the entries whose element has several values."""
    _, group = np.unique(elements, return_inverse=True)
    pairs = np.unique(np.stack([group, np.unique(values, return_inverse=True)[1]]), axis=1)
    return np.bincount(pairs[0])[group] > 1


def assignments(
    first: Executors, second: Executors, itemsize: int
) -> Iterator[tuple[Threads, Threads]]:
    """Yield the assignments of points to threads that may occur together.

    Two loops of the same shape execute the same point by the same thread.
    """
    if first == second:
        yield from ((f, f) for f in first.assignments(itemsize))
        return
    for f in first.assignments(itemsize):
        for g in second.assignments(itemsize):
            yield f, g


class Kind(Enum):
    """Kinds of accesses. Two accesses conflict unless both are reads, or both are atomic."""

    READ = "read"
    ATOMIC_READ = "atomic read"
    ATOMIC = "atomic"
    WRITE = "write"

    def conflicts(self, other: Kind) -> bool:
        both = {self, other}
        reads, atomics = {Kind.READ, Kind.ATOMIC_READ}, {Kind.ATOMIC_READ, Kind.ATOMIC}
        return not (both <= reads or both <= atomics)


@dataclass(frozen=True)
class RecentAccess:
    """An access of the block since its last barrier."""

    by: Executors
    time: int


class Later(NamedTuple):
    """An access that is not yet in the record of its tensor, because nothing needs it there."""

    event: int
    accessed: Callable[[], ElementAccess]
    kind: Kind
    time: int


class ThreadOrder:
    """Happens-before order of the accesses of a block's threads since its last block barrier.

    Args:
        thread_groups: the threads of each group.
    """

    def __init__(self, thread_groups: Sequence[np.ndarray]) -> None:
        self._members, self._count = thread_groups, sum(map(len, thread_groups))
        self.thread_groups = tuple(i for i, threads in enumerate(thread_groups) if len(threads))
        self.accesses: dict[int, RecentAccess] = {}
        """Accesses that are in the records of their tensors, by event."""
        self.later: dict[int, list[Later]] = {}
        """Accesses that are not in their record yet, by ``id`` of the record. An empty list means
        that all are."""
        self.barriers = 0
        """Number of barriers of all threads so far."""
        self.time = 1
        """Time of the next access."""
        self._known: np.ndarray | None = None
        """``[t, u]``: last time of thread u that happens before the next access of thread t."""
        self._published: np.ndarray | None = None
        """Last time of each thread that an acquire joins."""

    def events(self) -> list[int]:
        """Return the accesses since the last barrier of all threads."""
        return [
            *self.accesses,
            *(access.event for accesses in self.later.values() for access in accesses),
        ]

    def is_known(self, threads: np.ndarray, others: np.ndarray, time: int) -> Any:
        """Return whether what ``others`` access at ``time`` happens before ``threads`` continue."""
        return False if self._known is None else self._known[threads, others] >= time

    def barrier_all(self) -> None:
        """Order all accesses of all threads before their next ones."""
        self.barriers += 1
        if self.later:
            self.accesses.clear()
            self.later.clear()
            self._known = self._published = None

    def barrier(self, threads: np.ndarray) -> None:
        """Order the accesses of these threads before their next ones."""
        if len(threads) == self._count:
            self.barrier_all()
        elif self.later:
            ordered = self._matrix()
            joined = ordered[threads].max(axis=0)
            joined[threads] = self.time
            ordered[threads] = joined
            self.time += 1

    def release(self, thread_groups: tuple[int, ...]) -> None:
        """Note a release by these thread groups."""
        if self.later:
            threads = self.members(thread_groups)
            published = self._matrix()[threads].max(axis=0)
            if self._published is not None:
                published = np.maximum(published, self._published)
            published[threads] = self.time
            self._published = published
            self.time += 1

    def acquire(self, thread_groups: tuple[int, ...]) -> None:
        """Join all that any thread of the block has released into these thread groups."""
        if self._published is not None:
            threads, ordered = self.members(thread_groups), self._matrix()
            ordered[threads] = np.maximum(ordered[threads], self._published)

    def members(self, thread_groups: Sequence[int]) -> np.ndarray:
        """Return the threads of these thread groups."""
        return np.concatenate([self._members[i] for i in thread_groups])

    def _matrix(self) -> np.ndarray:
        if self._known is None:
            self._known = np.zeros((self._count,) * 2, np.int32)
        return self._known


class _Last:
    """Last access to each element: its event, and the point that made it."""

    def __init__(self, size: int) -> None:
        self.event, self.point = np.zeros(size, np.int32), np.zeros(size, np.int32)

    def put(self, elements: np.ndarray, event: Any, points: np.ndarray) -> None:
        self.event[elements], self.point[elements] = event, points


class ThreadRecord:
    """Accesses to one tensor by threads: the last write to each element, and of its reads and
    its atomic accesses two by different threads."""

    def __init__(self, size: int, itemsize: int) -> None:
        self._size, self._itemsize = size, itemsize
        self._last: dict[Kind, list[_Last]] = {}

    def add(
        self, order: ThreadOrder, event: int, accessed: Callable[[], ElementAccess], kind: Kind,
        time: int,
    ) -> tuple[int, int] | None:  # fmt: skip
        """Add an access at a time of ``order``. Return an event of another thread of the block
        that is unordered with it in every assignment of threads, and the element; None if there is
        no such event."""
        later = order.later.get(id(self))
        if later is None:
            later = order.later[id(self)] = []
        elif not 0 < len(later) < _MAX_LATER or any(kind.conflicts(a.kind) for a in later):
            for access in later:
                self._note(order, access.event, access.accessed(), access.kind, access.time)
            later.clear()
            current = accessed()
            conflict = self._conflict(order, current, kind)
            self._note(order, event, current, kind, time)
            return conflict
        later.append(Later(event, accessed, kind, time))
        return None

    def add_unchecked(self, order: ThreadOrder, later: Later) -> None:
        """Add a write of elements that no other access of the launch has touched."""
        order.later.setdefault(id(self), []).append(later)

    def _conflict(
        self, order: ThreadOrder, accessed: ElementAccess, kind: Kind
    ) -> tuple[int, int] | None:
        before = [a for other, last in self._last.items() if kind.conflicts(other) for a in last]
        for last in before:
            events = last.event[accessed.elements]
            for event in np.unique(events).tolist():
                noted = order.accesses.get(event)
                if noted is None:
                    continue
                positions = np.flatnonzero(events == event)
                element = self._apart(order, noted, last, accessed, positions)
                if element is not None:
                    return event, element
        return None

    def _apart(
        self,
        order: ThreadOrder,
        noted: RecentAccess,
        last: _Last,
        accessed: ElementAccess,
        positions: np.ndarray,
    ) -> int | None:
        """Return an element that different threads access unordered, or None if in some assignment
        there is no such element."""
        elements, points = accessed.elements[positions], accessed.points[positions]
        others, element = last.point[elements], None
        for f, g in assignments(noted.by, accessed.by, self._itemsize):
            threads, accessors = f(others), g(points)
            is_ordered = np.asarray(order.is_known(accessors, threads, noted.time))
            conflicts = (threads != accessors) & ~is_ordered
            if not conflicts.any():
                return None
            if element is None:
                element = int(elements[np.flatnonzero(conflicts)[0]])
        return element

    def _note(
        self, order: ThreadOrder, event: int, accessed: ElementAccess, kind: Kind, time: int
    ) -> None:
        """Record an access. A write of one element by several threads is not recorded for it."""
        executors, elements, points = accessed
        if kind is Kind.WRITE:
            if kind not in self._last:
                self._last[kind] = [_Last(self._size)]
            (last,) = self._last[kind]
            last.put(elements, event, points)
            shared = elements[last.point[elements] != points]
            last.event[shared] = 0
        else:
            self._note_two(order, event, accessed, kind)
        order.accesses[event] = RecentAccess(executors, time)

    def _note_two(
        self, order: ThreadOrder, event: int, accessed: ElementAccess, kind: Kind
    ) -> None:
        executors, elements, points = accessed
        if kind not in self._last:
            self._last[kind] = [_Last(self._size), _Last(self._size)]
        last, other = self._last[kind]
        events, noted_points = last.event[elements], last.point[elements]
        for before in np.unique(events).tolist():
            noted = order.accesses.get(before)
            if noted is not None:
                displaced = (events == before) & (
                    (noted_points != points) | (noted.by != executors)
                )
                other.put(elements[displaced], before, noted_points[displaced])
        last.put(elements, event, points)
        repeated = last.point[elements] != points
        if repeated.any():
            other.put(elements[repeated], event, points[repeated])
