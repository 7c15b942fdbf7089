"""Phases of mbarriers that the threads of a block know to be complete."""

from __future__ import annotations

import numpy as np
from tvm import tirx

Slots = frozenset[tuple[tirx.Var, int]]
"""Mbarriers, each as a buffer and an index; index -1 stands for all of the buffer."""
Counts = dict[tuple[tirx.Var, int], np.ndarray]


class Phases:
    """Number of complete phases of each mbarrier that each thread knows of.

    A wait for parity ``p`` proves that a phase is complete if an even number of phases is known
    and ``p`` is 0, or an odd number and ``p`` is 1. Else it may return at once.

    Attributes:
        counts: an array of threads for each mbarrier that they have waited for.
    """

    def __init__(self) -> None:
        self.counts: Counts = {}
        self._unknown: set[tirx.Var] = set()

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
        if slot[0] in self._unknown:
            return np.zeros_like(threads)
        count = self.counts.get(slot, np.zeros(len(threads), np.int64))
        proves = count % 2 == parity
        self.counts = {**self.counts, slot: count + (threads & proves)}
        return threads & ~proves

    def share(self, threads: np.ndarray) -> None:
        """Let the threads that meet at a barrier know what one of them knows."""
        self.counts = {
            slot: np.where(threads, count[threads].max(), count)
            for slot, count in self.counts.items()
        }

    def join(self, other: Counts) -> None:
        """Do not follow mbarriers further whose phases depend on the path to a place."""
        for slot in self.counts | other:
            if not np.array_equal(self.counts.get(slot, 0), other.get(slot, 0)):
                self._unknown.add(slot[0])
