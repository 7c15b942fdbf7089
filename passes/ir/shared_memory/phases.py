"""Phases of mbarriers that the threads of a block know to be complete."""

from __future__ import annotations

import numpy as np
from tvm import tirx

Slots = frozenset[tuple[tirx.Var, int]]
"""Mbarriers, each as a buffer and an index; index -1 stands for all of the buffer."""
Counts = dict[tuple[tirx.Var, int], np.ndarray]
_UNKNOWN = -1


class Phases:
    """Number of complete phases of each mbarrier that each thread knows of.

    A wait for parity ``p`` proves that a phase is complete if an even number of phases is known
    and ``p`` is 0, or an odd number and ``p`` is 1. Else it may return at once.

    Accesses are followed in the order of the text. So it is unknown which phases a thread learns of
    from those that arrive at another mbarrier.

    Attributes:
        counts: an array of threads for each mbarrier that they have waited for.
    """

    def __init__(self, sizes: dict[tuple[tirx.Var, int], int]) -> None:
        """
        Args:
            sizes: number of arrivals of a phase of each mbarrier.
        """
        self.counts: Counts = {}
        self._sizes = sizes
        self._arrived = dict.fromkeys(sizes, 0)
        self._unknown: set[tirx.Var] = set()
        self._published: dict[tuple[tirx.Var, int], Counts] = {}
        """Counts of the threads that have arrived at each mbarrier."""
        self._informed: np.ndarray | np.bool_ = np.False_
        """Threads that have learned of phases from arrivals which are not known: they follow in the
        text, or the wait for them is not followed."""

    def may_end(self, slots: Slots, parity: np.ndarray | None) -> bool:
        """Return whether a wait may end after the arrivals that are recorded."""
        (slot, *others), numbers = slots, np.unique(parity)
        if others or slot not in self._sizes or parity is None or len(numbers) > 1:
            return True
        return self._arrived[slot] // self._sizes[slot] % 2 != numbers[0]

    def arrive(self, slots: Slots, threads: np.ndarray, is_known: bool) -> None:
        """Record that threads arrive at mbarriers, and publish the phases that they know of.

        Args:
            is_known: whether all of the threads arrive, and once.
        """
        for slot in slots:
            if is_known and len(slots) == 1 and slot in self._sizes:
                self._arrived[slot] += int(threads.sum())
            else:
                for other in [s for s in self._sizes if s[0].same_as(slot[0])]:
                    del self._sizes[other]
        known = {slot: _newest(count[threads]) for slot, count in self.counts.items()}
        for slot in slots:
            earlier = self._published.get(slot, {})
            self._published[slot] = earlier | {
                s: _newest(np.array([n, earlier.get(s, 0)])) for s, n in known.items()
            }

    def wait(self, slots: Slots, threads: np.ndarray, parity: np.ndarray | None) -> np.ndarray:
        """Record a wait. Return those of ``threads`` to which it proves nothing, because it may
        return at once.

        Args:
            parity: of each thread or of all of them; None if it is not known, or not whether the
                threads wait. Phases of these mbarriers are not followed any more then.
        """
        slot, *others = slots
        if others or slot[1] < 0 or parity is None:
            self._unknown.update(data for data, _ in slots)
        is_followed = slot[0] not in self._unknown
        default = np.where(self._informed, _UNKNOWN, np.zeros(len(threads), np.int64))
        count = self.counts.get(slot, default)
        is_early = threads & is_followed & (count != _UNKNOWN) & (count % 2 != parity)
        proves = threads & ~is_early
        self.counts = {**self.counts, slot: count + (proves & (count != _UNKNOWN))}
        published = self._published.get(slot) if is_followed else None
        for other in {*self.counts, *(published or ())} - {slot}:
            known = _UNKNOWN if published is None else published.get(other, 0)
            count = self.counts.get(other, default)
            learns = proves & ((count < known) | (known == _UNKNOWN))
            self.counts[other] = np.where(learns, _UNKNOWN, count)
        if published is None:
            self._informed = self._informed | proves
        return is_early

    def share(self, threads: np.ndarray) -> None:
        """Let the threads that meet at a barrier know what one of them knows."""
        self.counts = {
            slot: np.where(threads, _newest(count[threads]), count)
            for slot, count in self.counts.items()
        }
        if np.any(self._informed & threads):
            self._informed = self._informed | threads

    def join(self, other: Counts) -> None:
        """Do not follow mbarriers further whose phases depend on the path to a place."""
        for slot in self.counts | other:
            if not np.array_equal(self.counts.get(slot, 0), other.get(slot, 0)):
                self._unknown.add(slot[0])


def _newest(counts: np.ndarray) -> int:
    """Return the largest of these numbers, or ``_UNKNOWN`` if one of them is."""
    return _UNKNOWN if (counts == _UNKNOWN).any() else int(counts.max())
