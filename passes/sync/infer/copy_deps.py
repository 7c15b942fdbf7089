"""Copies of a plan between what the kernel brings and what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..regions.copies import Copy
from ..regions.granules import Counter
from .context import copies_with_granules

Granule = tuple[Counter, int, int]
"""A counter, the owner of a copy, and the number of a granule."""


@dataclass
class Relay:
    """One copy: what must be there before it, and what is there behind it."""

    needs: list[Granule] = field(default_factory=list)
    brings: list[Granule] = field(default_factory=list)


def queues_of(counters: Iterable[Counter]) -> list[list[Relay]]:
    """The copies of each stream, in its order."""
    streams: dict[tuple, dict[int, Relay]] = defaultdict(lambda: defaultdict(Relay))

    def relay(copy: Copy) -> Relay:
        return streams[copy.rank, copy.stream][copy.number]

    for counter in counters:
        traffic = counter.traffic
        if counter.by_copies:
            assert traffic.copies_out is not None
            for copy, owner, number in copies_with_granules(counter, traffic.copies_out):
                relay(copy).needs.append((counter, owner, number))
        elif counter.is_of_copies:
            assert traffic.copies is not None
            for copy, owner, number in copies_with_granules(counter, traffic.copies):
                relay(copy).brings.append((counter, owner, number))
    return [[relays[n] for n in sorted(relays)] for relays in streams.values()]
