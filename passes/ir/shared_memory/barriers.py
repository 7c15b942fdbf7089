"""Arrivals of threads at the barriers of a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .effects import REDUCE, Barrier
from .findings import Found, MisplacedBarrier, Path
from .values import WARP, warps_of

NUMBERS = range(16)
"""Numbers of the barriers of a block. The block barrier has number 0."""
_ALL_OR_NONE = "all threads to reach it, or none"


@dataclass(frozen=True, eq=False)
class Arrival:
    """Threads that arrive at a barrier.

    Attributes:
        threads: a bool for each thread of the block.
        path: where the barrier is.
        statement: number of the executed statement.
    """

    threads: np.ndarray
    path: Path
    barrier: Barrier
    statement: int

    @property
    def size(self) -> int:
        return int(self.threads.sum())


Waiting = Mapping[int, list[Arrival]]


class Barriers:
    """The barriers of a block during a walk. A named barrier counts the warps that arrive.

    Attributes:
        waiting: arrivals at barriers that other threads have not reached yet, by number.
        warps: bits of the sets of warps that have passed each named barrier.
    """

    def __init__(self, threads: int, producers: int) -> None:
        """
        Args:
            threads, producers: numbers of threads of the block, and of those in producer warps.
        """
        self._threads = threads
        self._producers = producers
        self.waiting: dict[int, list[Arrival]] = {}
        self.warps: dict[int, set[int]] = {}

    def arrive(self, arrival: Arrival, is_exact: bool) -> list[Arrival]:
        """Record an arrival. Return all arrivals at the barrier if the last threads arrive, else an
        empty list.

        Args:
            is_exact: whether all of the threads arrive if one does.

        Raises:
            Found: names threads that may wait forever, or a barrier that does not exist.
        """
        barrier = arrival.barrier
        self._require_legal(arrival)
        for others in self.waiting.values():
            if any((other.threads & arrival.threads).any() for other in others):
                raise Found(self._out_of_order(others, arrival))
        count = self._count(barrier)
        arrivals = [*self.waiting.pop(barrier.number, []), arrival]
        if any(self._count(other.barrier) != count for other in arrivals):
            raise Found(self._of_two_counts(arrivals))
        arrived = sum(map(self._arrived, arrivals))
        if not is_exact or arrived > count:
            raise Found(self._unequal(arrival, is_exact))
        if arrived == count:
            return arrivals
        self.waiting[barrier.number] = arrivals
        return []

    def require_equal(self, waiting: Waiting) -> None:
        """Refuse barriers that some of their threads may not reach.

        Args:
            waiting: arrivals before a part of the function that may not run.
        """
        for number in {**waiting, **self.waiting}:
            arrivals = self.waiting.get(number)
            if arrivals is not waiting.get(number):
                barrier = (arrivals or waiting[number])[-1]
                what = (
                    f"whether all {self._count(barrier.barrier)} threads of {_name(barrier)} reach "
                    "it depends on a condition, a jump or a number of iterations"
                )
                raise Found(_misplaced(barrier, what))

    def require_none(self) -> None:
        """Refuse barriers that some of their threads never reach."""
        for arrivals in self.waiting.values():
            size, count = sum(a.size for a in arrivals), self._count(arrivals[-1].barrier)
            what = f"only {size} threads reach a barrier of {count}"
            raise Found(_misplaced(arrivals[-1], what))

    def _count(self, barrier: Barrier) -> int:
        return self._threads if barrier.count is None else barrier.count

    def _arrived(self, arrival: Arrival) -> int:
        """Return the number of threads that a barrier counts for an arrival."""
        if arrival.barrier.count is None:
            return arrival.size
        return WARP * warps_of(arrival.threads).bit_count()

    def _require_legal(self, arrival: Arrival) -> None:
        barrier, count = arrival.barrier, arrival.barrier.count
        if barrier.number is None:
            what = "a number or a count of threads that is not a constant"
            raise Found(_misplaced(arrival, what, "constants, such as T.sync_threads(3, 128)"))
        if barrier.number not in NUMBERS:
            what, legal = f"barrier {barrier.number}", f"a number from 0 to {NUMBERS[-1]}"
            raise Found(_misplaced(arrival, what, legal))
        if count is not None and (count <= 0 or count % WARP):
            legal = f"a multiple of {WARP}, because a barrier counts whole warps"
            raise Found(_misplaced(arrival, f"a barrier of {count} threads", legal))
        most = -(-self._threads // WARP) * WARP
        if count is not None and count > most:
            what = f"a barrier of {count} threads in a block of {self._threads}"
            raise Found(_misplaced(arrival, what, f"at most {most}"))
        if barrier.number == 0 and count not in (None, most):
            what = f"{count} threads at barrier 0, which is that of all {self._threads} threads"
            raise Found(_misplaced(arrival, what, f"a number from 1 to {NUMBERS[-1]}"))
        is_partial = warps_of(arrival.threads) & warps_of(~arrival.threads)
        if (barrier.number or count is not None) and is_partial:
            what = f"{arrival.size} threads, a part of a warp, reach {_name(arrival)}"
            legal = f"whole warps of {WARP} threads, because a barrier counts whole warps"
            raise Found(_misplaced(arrival, what, legal))

    def _out_of_order(self, others: list[Arrival], arrival: Arrival) -> MisplacedBarrier:
        """Return the finding that threads reach a barrier while they wait at one."""
        last, size = others[-1], sum(other.size for other in others)
        count, name, then = self._count(last.barrier), _name(last), _name(arrival)
        if arrival.barrier.number == last.barrier.number:
            then = f"{name} again"
        what = (
            f"{size} of the {count} threads of {name} reach {then} before the others reach {name}"
        )
        legal = (
            f"all {count} threads to reach {name} before a later barrier that one of them reaches, "
            f"such as branches that end after {name}"
        )
        places = ((name, last.path), (then, arrival.path))
        return MisplacedBarrier(last.path, last.barrier.op, what, legal, places)

    def _of_two_counts(self, arrivals: list[Arrival]) -> MisplacedBarrier:
        counts = [self._count(arrival.barrier) for arrival in arrivals]
        what = f"barrier {arrivals[-1].barrier.number} counts {counts[-2]} and {counts[-1]} threads"
        places = tuple((f"{n} threads", a.path) for n, a in zip(counts, arrivals, strict=True))
        last = arrivals[-1]
        return MisplacedBarrier(last.path, last.barrier.op, what, "one count", places)

    def _unequal(self, arrival: Arrival, is_exact: bool) -> MisplacedBarrier:
        """Return the finding that more threads reach a barrier than it counts, or that threads
        differ in whether they reach it."""
        size, count = arrival.size, self._count(arrival.barrier)
        if not is_exact and size == count:
            what = (
                "a condition, a break, a continue or a number of iterations around it may differ "
                "between threads"
            )
            return _misplaced(arrival, what)
        if arrival.barrier.op == REDUCE and size > count:
            what = (
                f"{size} threads meet at barriers that count {count} threads, because TileLang "
                "divides work among the threads of the first axis only"
            )
            return _misplaced(arrival, what, f"threads={size}")
        if size < count:
            return _misplaced(arrival, f"only {size} threads reach a barrier of {count}")
        what = f"{size} threads reach a barrier that counts {count}"
        if arrival.threads[: self._producers].any():
            what += ", because those of producer warps reach what is before T.Pipelined, too"
            return _misplaced(arrival, what, "T.sync_threads(), or the barrier in T.Pipelined")
        return _misplaced(arrival, what, f"T.sync_threads({arrival.barrier.number}, {size})")


def _misplaced(arrival: Arrival, what: str, legal: str = _ALL_OR_NONE) -> MisplacedBarrier:
    places = (("", arrival.path),)
    return MisplacedBarrier(arrival.path, arrival.barrier.op, what, legal, places)


def _name(arrival: Arrival) -> str:
    """Return the name of a barrier for a message."""
    barrier = arrival.barrier
    if not barrier.op:
        return "a barrier that orders accesses of shared memory"
    return f"barrier {barrier.number}" if barrier.number else "the barrier of the block"
