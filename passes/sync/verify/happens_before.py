"""The happens-before relation of all events in several launches of a program on all ranks."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from .events import DATA, Event
from .launches import Rows

_SCOPES = ("cta", "gpu", "sys")
HOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b, "le": lambda a, b: a <= b, "lt": lambda a, b: a < b,
    "reached": lambda a, b: a >= b,
}  # fmt: skip
"""For each relation of a wait, the condition that ends it: (flag, awaited value) -> bool."""
_MANY = 16
"""Number of sources of an arrival from which on all its predecessors are computed and cached."""

Place = tuple[int, int]
"""A block of one launch, and the position of an operation in it."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One signal, wait, fence or barrier of one block.

    Attributes:
        block: number of the block among those of all ranks and launches.
        position: position in the order of the block.
        flag: name of the tensor, and index, of the flag; empty if there is none or it is unknown.
    """

    event: Event
    launch: int
    rank: int
    block: int
    position: int
    flag: tuple
    value: int | None


class Timeline:
    """All occurrences of all events, each with its block and its position in the block."""

    def __init__(self, rows: list[Rows]) -> None:
        self.rows = [r for r in rows if r.launch.size]
        depth = max((len(r.key) for r in self.rows), default=1)
        columns = [
            np.concatenate([self._column(r, c, depth) for r in self.rows] or [np.zeros(0, int)])
            for c in range(depth + 4)
        ]
        order = np.lexsort(columns[::-1])
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        heads = np.stack(columns[:3], axis=1)
        self.blocks, block = np.unique(heads, axis=0, return_inverse=True)
        """(launch, rank, number) of each block."""
        self.position: dict[Rows, np.ndarray] = {}
        self.block: dict[Rows, np.ndarray] = {}
        start = 0
        for r in self.rows:
            end = start + r.launch.size
            self.position[r] = position[start:end]
            self.block[r] = block.reshape(-1)[start:end]
            start = end

    @staticmethod
    def _column(rows: Rows, number: int, depth: int) -> np.ndarray:
        if number < 3:
            return (rows.launch, rows.rank, rows.block)[number]
        if number == depth + 3:
            return np.full(rows.launch.shape, rows.event.kind not in DATA)
        key = rows.key
        return key[number - 3] if number - 3 < len(key) else np.full(rows.launch.shape, -1)

    def operations(self) -> list[Operation]:
        """Return all synchronization operations in the order of their positions."""
        operations = []
        for rows in self.rows:
            event = rows.event
            if event.kind in DATA:
                continue
            values = rows.value.tolist() if rows.value is not None else [None] * rows.rank.size
            flags = zip(*(a.tolist() for a in rows.low), strict=True) if rows.low else None
            for launch, rank, block, position, value in zip(
                rows.launch.tolist(), rows.rank.tolist(), self.block[rows].tolist(),
                self.position[rows].tolist(), values, strict=True,
            ):  # fmt: skip
                is_flag = flags and event.tensor and event.kind != "barrier"
                flag = (event.tensor.name, *next(flags)) if is_flag else ()
                operations.append(Operation(event, launch, rank, block, position, flag, value))
        return sorted(operations, key=lambda o: o.position)


class HappensBefore:
    """The happens-before relation between places.

    Places are ordered by the statements of each block, by the launches on a rank, by signals and
    their waits, and by barriers and fences. A wait comes after all signals that the flag needs to
    reach the awaited value, if memory starts at zero. If the values do not determine these signals,
    it comes after all signals of the same launch.

    Args:
        is_local: returns whether a flag's tensor is local to a rank, without copies at other ranks.
        signalled: names of the tensors whose flags the program signals, all at known indices.
        strengthened: events that are treated as if their ``sem`` or ``scope`` were sufficient.
    """

    def __init__(
        self, timeline: Timeline, operations: list[Operation],
        is_local: Callable[[str], bool], signalled: Collection[str],
        strengthened: Mapping[Event, Collection[str]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._timeline, self._is_local = timeline, is_local
        self._strong, self._signalled = strengthened, signalled
        self._signals: dict[tuple, list[tuple[Operation, str]]] = defaultdict(list)
        """By flag: its signals, each with the scope of its release ("" for none)."""
        self._sources: dict[tuple, list[Place]] = {}
        """By arrival (what a wait or barrier acquires): its direct predecessors."""
        self._acquired: dict[int, list[tuple[int, tuple]]] = defaultdict(list)
        """By block: (position, arrival)."""
        self._before: dict[tuple, dict[int, int]] = {}
        """By arrival: all its predecessors, as the last position of each block."""
        self._waits: list[tuple[Operation, str, int]] = []
        """Waits, each with the scope of its acquire ("" for none) and the acquire's position."""
        self._of_rank: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (launch, rank, _) in enumerate(timeline.blocks.tolist()):
            self._of_rank[launch, rank].append(number)
        self._find_scopes(operations)
        self._match_waits()
        for arrivals in self._acquired.values():
            arrivals.sort(key=lambda a: a[0])
        self._start_launches()

    def precedes(self, first: Place, second: Place) -> bool:
        """Return whether everything written up to ``first`` is visible at ``second``."""
        if first[0] == second[0]:
            return first[1] < second[1]
        visited: set[tuple] = set()
        stack = list(self._arrivals(*second))
        while stack:
            arrival = stack.pop()
            if arrival in visited:
                continue
            visited.add(arrival)
            before = self._before.get(arrival)
            if before is None and len(self._sources[arrival]) >= _MANY:
                before = self._all_before(arrival)
            if before is not None:
                if before.get(first[0], -1) > first[1]:
                    return True
                continue
            for block, position in self._sources[arrival]:
                if block == first[0] and position > first[1]:
                    return True
                stack += self._arrivals(block, position)
        return False

    def _arrivals(self, block: int, position: int) -> list[tuple]:
        """Return the arrivals that the block has acquired, including the start of its launch."""
        acquired = self._acquired.get(block, ())
        count = bisect.bisect_left(acquired, position, key=lambda a: a[0]) if acquired else 0
        return [a for _, a in acquired[:count]]

    def _all_before(self, arrival: tuple) -> dict[int, int]:
        """Return, for each block, the last position that precedes ``arrival``."""
        last: dict[int, int] = {}
        stack, visited = [arrival], {arrival}
        while stack:
            current = stack.pop()
            before = self._before.get(current)
            places = before.items() if before is not None else self._sources[current]
            for block, position in places:
                if last.get(block, -1) >= position:
                    continue
                last[block] = position
                if before is None:
                    new = [a for a in self._arrivals(block, position) if a not in visited]
                    visited.update(new)
                    stack += new
        self._before[arrival] = last
        return last

    def _start_launches(self) -> None:
        """Order each launch of a rank after the previous launches of that rank."""
        end = len(self._timeline.blocks) and max(
            (int(p.max()) for p in self._timeline.position.values()), default=0
        )
        for (launch, rank), blocks in sorted(self._of_rank.items()):
            if launch == 0:
                continue
            arrival = ("start", launch, rank)
            before = self._of_rank.get((launch - 1, rank), ())
            self._sources[arrival] = [(b, end + 1) for b in before]
            for block in blocks:
                self._acquired[block].insert(0, (-1, arrival))
        for launch, rank in sorted(self._of_rank):
            if launch:
                self._all_before(("start", launch, rank))

    def _find_scopes(self, operations: list[Operation]) -> None:
        """Find the scope of each signal's release and of each wait's acquire.

        A fence before a relaxed signal makes it a release; a fence after a relaxed wait makes it an
        acquire at the position of the fence.
        """
        fenced: dict[int, str] = {}
        relaxed: dict[int, list[Operation]] = defaultdict(list)
        passed: dict[tuple, int] = defaultdict(int)
        for o in operations:
            event, strong = o.event, self._strong.get(o.event, ())
            scope = "sys" if "scope" in strong else event.scope
            if event.kind == "barrier":
                self._add_barrier(o, passed)
            elif event.kind == "fence":
                fenced[o.block] = scope
                for wait in relaxed.pop(o.block, ()):
                    narrowest = min(scope, wait.event.scope, key=_SCOPES.index)
                    self._waits.append((wait, narrowest, o.position))
            elif event.kind == "signal":
                if event.sem in ("release", "acq_rel") or "sem" in strong:
                    self._signals[o.flag].append((o, scope))
                elif o.block in fenced:
                    narrowest = min(scope, fenced[o.block], key=_SCOPES.index)
                    self._signals[o.flag].append((o, narrowest))
                else:
                    self._signals[o.flag].append((o, ""))
            elif event.sem == "acquire" or "sem" in strong:
                self._waits.append((o, scope, o.position))
            else:
                self._waits.append((o, "", o.position))
                relaxed[o.block].append(o)

    def _add_barrier(self, o: Operation, passed: dict) -> None:
        """Match the n-th barrier of each participant with the n-th barrier of the others."""
        barrier = o.event.participants
        participant = ("rank", o.rank) if barrier == "ranks" else ("block", o.block)
        count = passed[barrier, o.launch, participant]
        passed[barrier, o.launch, participant] += 1
        instance = o.rank if barrier == "grid" else -1
        arrival = (barrier, o.launch, instance, count)
        self._sources.setdefault(arrival, []).append((o.block, o.position))
        self._acquired[o.block].append((o.position, arrival))

    def _match_waits(self) -> None:
        for wait, scope, position in self._waits:
            if not wait.flag or wait.flag[0] not in self._signalled:
                self._add_unknown_wait(wait, position)
                continue
            flag = self._flag_of(wait)
            signals = self._signals_of(flag)
            if not signals or not scope:
                continue
            arrival = ("flag", flag, wait.launch, wait.value, wait.rank, scope, wait.event.relation)
            if wait.value is None or arrival not in self._sources:
                needed = self._needed_signals(wait, signals)
                if wait.value is None:
                    arrival = (*arrival, wait.block, wait.position)
                self._sources[arrival] = [
                    (s.block, s.position)
                    for s, published in needed
                    if _reaches(s, published, wait, scope)
                ]
            self._acquired[wait.block].append((position, arrival))

    def _flag_of(self, o: Operation) -> tuple:
        return (*o.flag, "of", o.rank) if self._is_local(o.flag[0]) else o.flag

    def _signals_of(self, flag: tuple) -> list[tuple[Operation, str]]:
        if "of" in flag:
            rank = flag[-1]
            return [s for s in self._signals.get(flag[:-2], ()) if s[0].rank == rank]
        return self._signals.get(flag, [])

    def _add_unknown_wait(self, wait: Operation, position: int) -> None:
        """Order all earlier launches and this one before a wait whose signals are not known.

        The kernel does not signal the flag, or the index of a signal depends on data.
        """
        arrival = ("outside", wait.launch)
        if arrival not in self._sources:
            end = 1 << 60
            self._sources[arrival] = [
                (n, end) for n, b in enumerate(self._timeline.blocks.tolist())
                if b[0] <= wait.launch
            ]  # fmt: skip
        self._acquired[wait.block].append((position, arrival))

    def _needed_signals(
        self, wait: Operation, signals: list[tuple[Operation, str]]
    ) -> list[tuple[Operation, str]]:
        """Return the signals without which ``wait`` would not end."""
        signals = [s for s in signals if s[0].launch <= wait.launch]
        in_launch = [
            s for s in signals
            if s[0].launch == wait.launch
            and not (s[0].block == wait.block and s[0].position > wait.position)
        ]  # fmt: skip
        if wait.value is None or any(s.value is None for s, _ in signals):
            return in_launch
        if not all(s.event.adds for s, _ in signals):
            return self._first_sufficient(wait, signals) or in_launch
        if wait.event.relation not in ("reached", "ge", "eq"):
            return in_launch
        return self._needed_additions(wait, signals) if signals else in_launch

    def _first_sufficient(self, wait, signals) -> list[tuple[Operation, str]]:
        """Return the first signal of each block whose stored value ends ``wait``."""
        holds = HOLDS[wait.event.relation]
        first: dict[tuple, tuple[Operation, str]] = {}
        for s in signals:
            if holds(s[0].value, wait.value):
                number = tuple(self._timeline.blocks[s[0].block][1:].tolist())
                first.setdefault(number, s)
        return list(first.values())

    def _needed_additions(self, wait, signals) -> list[tuple[Operation, str]]:
        """Return the additions without which the flag does not reach the awaited value.

        These are all additions of the earlier launches that the wait needs. In the last of these
        launches, an addition is needed if the sum is too small without it and without the later
        additions of its block.
        """
        missing = wait.value
        by_launch: dict[int, list] = defaultdict(list)
        for s in signals:
            by_launch[s[0].launch].append(s)
        needed: list = []
        for launch in sorted(by_launch):
            if missing <= 0:
                break
            additions = by_launch[launch]
            total = sum(s.value for s, _ in additions)
            remaining: dict[int, int] = defaultdict(int)
            for s, _ in additions:
                remaining[s.block] += s.value
            for s in additions:
                if total - remaining[s[0].block] < missing:
                    needed.append(s)
                remaining[s[0].block] -= s[0].value
            missing -= total
        return needed


def _reaches(signal: Operation, published: str, wait: Operation, scope: str) -> bool:
    """Return whether the scopes of a release and an acquire include both operations."""
    if signal.block == wait.block:
        return True
    narrowest = min(published or "cta", scope, key=_SCOPES.index)
    return narrowest == "sys" or (narrowest == "gpu" and signal.rank == wait.rank)
