"""Modification order of a word in global memory: the values that it had, and what changed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .clock import Clock
from .order import Sync


class Entry(NamedTuple):
    """One value in the history of a word."""

    value: Any
    event: int
    sync: Sync
    poisoned: bool
    causes: Clock | None = None
    """Clock of all that led to the value, whether or not memory orders it."""
    replaces: bool = False
    """True if a read-modify-write made it from the previous value: no change lands between them."""
    combine: Any = None
    """Commutative function by which a read-modify-write made it; None: another change."""
    polls: bool = False
    """True if a loop that may poll made it: what follows the loop depends on the previous value."""


class Change(NamedTuple):
    """One change of a word."""

    event: int
    before: Any
    after: Any
    adds: bool
    """True if an atomic addition made it."""


class EndedWait(NamedTuple):
    """One wait for a word, which has ended."""

    event: int
    relation: str
    want: Any
    seen: Any
    """Value that ended it."""


def region_of(indices: list[tuple]) -> tuple:
    """Return the NumPy index of consecutive words."""
    if len(indices) == 1:
        return indices[0]
    *first, last = indices[0]
    return (*first, slice(last, last + len(indices)))


def make_whole(histories: list[list[Entry]], positions: list[int]) -> None:
    """Advance the chosen values of several words until each vector store is observed in all of its
    words or in none."""
    places: dict[int, list[tuple[int, int]]] = {}
    for word, entries in enumerate(histories):
        for i, entry in enumerate(entries[1:], 1):
            places.setdefault(entry.event, []).append((word, i))
    shared = [words for words in places.values() if len(words) > 1]
    changed = True
    while changed:
        changed = False
        for words in shared:
            seen = [positions[word] >= i for word, i in words]
            if any(seen) and not all(seen):
                changed = True
                for word, i in words:
                    positions[word] = max(positions[word], i)


def place_of(entries: Sequence[Entry], before: int | None) -> int:
    """Return the index at which a change lands: before another one, or last."""
    if before is None:
        return len(entries)
    return next(position for position, entry in enumerate(entries) if entry.event == before)
