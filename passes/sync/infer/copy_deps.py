"""Dependences of a plan's copies: the granules that each waits for, and those that it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..regions.copies import Copy
from ..regions.granules import Counter
from .context import copies_with_granules

Granule = tuple[Counter, int, int]
"""A counter, the rank that owns the copy, and the number of a granule."""


@dataclass
class CopyDeps:
    """Dependences of one copy.

    Attributes:
        needs: granules that must have arrived before the copy.
        produces: granules that have arrived after the copy.
    """

    needs: list[Granule] = field(default_factory=list)
    produces: list[Granule] = field(default_factory=list)


def queues_of(counters: Iterable[Counter]) -> list[list[CopyDeps]]:
    """Return the copies of each stream, in stream order."""
    streams: dict[tuple, dict[int, CopyDeps]] = defaultdict(lambda: defaultdict(CopyDeps))

    def deps_of(copy: Copy) -> CopyDeps:
        return streams[copy.rank, copy.stream][copy.number]

    for counter in counters:
        accesses = counter.accesses
        if counter.by_copies:
            assert accesses.copies_out is not None
            for copy, owner, number in copies_with_granules(counter, accesses.copies_out):
                deps_of(copy).needs.append((counter, owner, number))
        elif counter.is_of_copies:
            assert accesses.copies is not None
            for copy, owner, number in copies_with_granules(counter, accesses.copies):
                deps_of(copy).produces.append((counter, owner, number))
    return [[deps[number] for number in sorted(deps)] for deps in streams.values()]
