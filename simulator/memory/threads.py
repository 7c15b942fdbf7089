"""The threads of one block: which of them makes an access, and what orders them.

Clocks tell the threads of a block apart by class. Within a class, and where several classes act
together, this finer record tells which accesses to global memory each thread knows to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

WARP = 32
_MOST_LATER = 64
"""Accesses that wait to be put into the record of their tensor."""
_MOST_THREADS = 1024
"""Threads of a block."""
_WIDEST = 32
"""Bytes of the widest vector that a thread accesses at a time."""
_MOST_CLASSES = 40
"""Classes that clocks tell apart: each costs time in every access of the block."""

Threads = Callable[[np.ndarray], np.ndarray]
"""Numbers of the threads that execute these points."""


class Divided(Exception):
    """A set of threads acts that is no union of classes: the schedule must run again.

    Attributes:
        class_of: a finer class of each thread of the block.
    """

    def __init__(self, class_of: np.ndarray) -> None:
        super().__init__()
        self.class_of = class_of


def cut(cuts: Iterable[int]) -> np.ndarray:
    """The class of each thread of a block, where a class ends at each of ``cuts``."""
    return np.searchsorted(sorted(cuts), np.arange(_MOST_THREADS), side="right") - 1


def finer(class_of: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Classes none of which has threads of several ``parts``, in the order of their threads."""
    _, first, found = np.unique(
        np.stack([class_of, parts]), axis=1, return_index=True, return_inverse=True
    )
    return np.argsort(np.argsort(first))[found.reshape(-1)]


def divide(class_of: np.ndarray, parts: np.ndarray) -> None:
    """Ask for classes none of which has threads of several ``parts``, unless they are too many.

    Raises:
        Divided: with these classes.
    """
    found = finer(class_of, parts)
    if found.max() < _MOST_CLASSES:
        raise Divided(found)


def names_of(class_of: np.ndarray) -> tuple[str, ...]:
    """Names of the classes: ``thread 0``, ``threads 32, 64 to 127``, ``other threads``."""
    last = class_of[-1]
    return tuple(
        "other threads" if i == last else _name(np.flatnonzero(class_of == i))
        for i in range(class_of.max() + 1)
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
    """Points are thread numbers."""

    def assignments(self, itemsize: int) -> list[Threads]:
        return [lambda points: points]


EACH_THREAD = EachThread()


class ParallelLoop(NamedTuple):
    """Points of T.Parallel. TileLang gives each thread of the loop vectors of points in turn; how
    wide they are depends on all that the loop accesses, so that several widths are possible."""

    extents: tuple[int, ...]
    first: int
    threads: int

    def assignments(self, itemsize: int) -> list[Threads]:
        return _by_vectors(self, itemsize)


@lru_cache(maxsize=4096)
def _by_vectors(loop: ParallelLoop, itemsize: int) -> list[Threads]:
    """Assignments for the widths that TileLang's SelectMinPaddingVectorSize can choose."""
    points, least, found = int(np.prod(loop.extents)), None, []
    for width in (1 << n for n in range(_WIDEST.bit_length())):
        padding = -points % (loop.threads * width)
        fits = points % width == 0 and width * itemsize <= _WIDEST
        if width == 1 or (fits and padding <= least):
            found.append(lambda p, width=width: loop.first + p // width % loop.threads)
        least = padding if least is None else min(least, padding)
    return found


Executors = EachThread | ParallelLoop


class Accessed(NamedTuple):
    """Elements of a tensor, flat, and the point that accesses each; an element may repeat."""

    by: Executors
    elements: np.ndarray
    points: np.ndarray


def assignments(
    one: Executors, other: Executors, itemsize: int
) -> Iterator[tuple[Threads, Threads]]:
    """All assignments of points to threads that are possible at the same time; the same point of
    two loops of the same shape is always executed by the same thread."""
    if one == other:
        yield from ((f, f) for f in one.assignments(itemsize))
        return
    for f in one.assignments(itemsize):
        for g in other.assignments(itemsize):
            yield f, g


@dataclass(frozen=True)
class Noted:
    """An access of the block since its last barrier."""

    by: Executors
    time: int


class Later(NamedTuple):
    """An access that is not yet in the record of its tensor, because nothing needs it there."""

    event: int
    accessed: Callable[[], Accessed]
    writes: bool
    time: int


class ThreadOrder:
    """What the threads of a block know of each other's accesses since the last barrier of all.

    Args:
        classes: the threads of each class.
    """

    def __init__(self, thread_groups: Sequence[np.ndarray]) -> None:
        self._classes, self._count = thread_groups, sum(map(len, thread_groups))
        self.thread_groups = tuple(i for i, threads in enumerate(thread_groups) if len(threads))
        self.accesses: dict[int, Noted] = {}
        """Those that are in the records of their tensors, by event."""
        self.later: dict[int, list[Later]] = {}
        """Those that are not, by ``id`` of the record; an empty list where all are."""
        self.barriers = 0
        """The number of barriers of all threads so far."""
        self.time = 1
        """Of the next access."""
        self._known: np.ndarray | None = None
        """``[t, u]``: the last time of thread u that is before the next access of thread t."""
        self._published: np.ndarray | None = None
        """What acquiring may make known: the last time of each thread."""

    def events(self) -> list[int]:
        """The accesses since the last barrier of all threads."""
        return [*self.accesses, *(access.event for some in self.later.values() for access in some)]

    def is_known(self, by: np.ndarray, of: np.ndarray, time: int) -> Any:
        """Whether an access of threads ``of`` at ``time`` is before the next of threads ``by``."""
        return False if self._known is None else self._known[by, of] >= time

    def barrier_all(self) -> None:
        """A barrier of all threads."""
        self.barriers += 1
        if self.later:
            self.accesses.clear()
            self.later.clear()
            self._known = self._published = None

    def barrier(self, threads: np.ndarray) -> None:
        """A barrier of these threads."""
        if len(threads) == self._count:
            self.barrier_all()
        elif self.later:
            known = self._matrix()
            joined = known[threads].max(axis=0)
            joined[threads] = self.time
            known[threads] = joined
            self.time += 1

    def release(self, thread_groups: tuple[int, ...]) -> None:
        """These classes release."""
        if self.later:
            threads = self.members(thread_groups)
            published = self._matrix()[threads].max(axis=0)
            if self._published is not None:
                published = np.maximum(published, self._published)
            published[threads] = self.time
            self._published = published
            self.time += 1

    def acquire(self, thread_groups: tuple[int, ...]) -> None:
        """These classes acquire. What any thread of the block has released counts as acquired."""
        if self._published is not None:
            threads, known = self.members(thread_groups), self._matrix()
            known[threads] = np.maximum(known[threads], self._published)

    def members(self, thread_groups: Sequence[int]) -> np.ndarray:
        """The threads of these classes."""
        return np.concatenate([self._classes[i] for i in thread_groups])

    def _matrix(self) -> np.ndarray:
        if self._known is None:
            self._known = np.zeros((self._count,) * 2, np.int32)
        return self._known


class _Last:
    """The last access to each element: its event, and the point that made it."""

    def __init__(self, size: int) -> None:
        self.event, self.point = np.zeros(size, np.int32), np.zeros(size, np.int32)

    def put(self, elements: np.ndarray, event: Any, points: np.ndarray) -> None:
        self.event[elements], self.point[elements] = event, points


class ThreadRecord:
    """The accesses to one tensor by threads of blocks: the last write to each element, and two
    reads of it by different threads."""

    def __init__(self, size: int, itemsize: int) -> None:
        self._size, self._itemsize = size, itemsize
        self._writes: _Last | None = None
        self._reads: list[_Last] = []

    def add(
        self, order: ThreadOrder, event: int, accessed: Callable[[], Accessed], writes: bool
    ) -> tuple[int, int] | None:
        """Add an access. Return the event of another thread of the block that nothing orders before
        it, whichever threads TileLang chooses, and the element."""
        later = order.later.get(id(self))
        found = None
        if later is None:
            later = order.later[id(self)] = []
        elif writes or len(later) == _MOST_LATER or self._is_written(order, later):
            for access in later:
                self._note(order, access.event, access.accessed(), access.writes, access.time)
            later.clear()
            now = accessed()
            found = self._conflict(order, now, writes)
            self._note(order, event, now, writes, order.time)
            return found
        later.append(Later(event, accessed, writes, order.time))
        return found

    def _is_written(self, order: ThreadOrder, later: list[Later]) -> bool:
        """Whether the block has written the tensor since its last barrier."""
        return not later or any(access.writes for access in later)

    def _conflict(
        self, order: ThreadOrder, accessed: Accessed, writes: bool
    ) -> tuple[int, int] | None:
        before = ([self._writes] if self._writes else []) + (self._reads if writes else [])
        for last in before:
            events = last.event[accessed.elements]
            for event in np.unique(events).tolist():
                noted = order.accesses.get(event)
                if noted is None:
                    continue
                at = np.flatnonzero(events == event)
                element = self._apart(order, noted, last, accessed, at)
                if element is not None:
                    return event, element
        return None

    def _apart(
        self, order: ThreadOrder, noted: Noted, last: _Last, accessed: Accessed, at: np.ndarray
    ) -> int | None:
        """An element that different threads access, unordered; None if some assignment has none."""
        elements, points = accessed.elements[at], accessed.points[at]
        others, found = last.point[elements], None
        for f, g in assignments(noted.by, accessed.by, self._itemsize):
            of, by = f(others), g(points)
            apart = (of != by) & ~np.asarray(order.is_known(by, of, noted.time))
            if not apart.any():
                return None
            if found is None:
                found = int(elements[np.flatnonzero(apart)[0]])
        return found

    def _note(
        self, order: ThreadOrder, event: int, accessed: Accessed, writes: bool, time: int
    ) -> None:
        """Remember an access; a write that several threads make is each one's own."""
        by, elements, points = accessed
        if writes:
            if self._writes is None:
                self._writes = _Last(self._size)
            self._writes.put(elements, event, points)
            shared = elements[self._writes.point[elements] != points]
            self._writes.event[shared] = 0
        else:
            self._note_read(order, event, accessed)
        order.accesses[event] = Noted(by, time)

    def _note_read(self, order: ThreadOrder, event: int, accessed: Accessed) -> None:
        by, elements, points = accessed
        if not self._reads:
            self._reads = [_Last(self._size), _Last(self._size)]
        last, other = self._reads
        events, at = last.event[elements], last.point[elements]
        for before in np.unique(events).tolist():
            noted = order.accesses.get(before)
            if noted is not None:
                kept = (events == before) & ((at != points) | (noted.by != by))
                other.put(elements[kept], before, at[kept])
        last.put(elements, event, points)
        several = last.point[elements] != points
        if several.any():
            other.put(elements[several], event, points[several])
