"""Versions of a tensor that one launch writes more than once. Each version has its own memory.

The text of the program defines which write a read sees: the one that it would see if all blocks of
all ranks executed each statement together. Each write of an element starts a new version of it. A
read or an addition belongs to the version of the last write before it. Versions are numbered
through the program. The version of an access is an expression of the loops around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.walk import arrows, is_leaf
from ..regions.accesses import Access, Program
from ..regions.schedule import Timestamps
from ..regions.space import Loop
from ..regions.tensor_accesses import (
    TensorAccesses,
    refuse_combination,
    refuse_second_write,
    region_of,
)

_ORDER = {"read": 0, "write": 1, "add": 2}
"""Order of the accesses of one statement."""
_EXPECTED = "expected another tensor for it, or explicit signals and waits"


@dataclass(frozen=True)
class Version:
    """The version that an access uses.

    Attributes:
        number: number of the version, an expression of the loops around the access.
        is_last: condition under which no later write overwrites the accessed elements. None if no
            expression of the loops says so.
    """

    number: tirx.PrimExpr
    is_last: tirx.PrimExpr | bool | None


@dataclass(frozen=True)
class Versions:
    """The versions of a tensor.

    Attributes:
        by_access: the version of each access.
        count: the number of versions.
        overwritten: the number of leading versions with elements that are written again.
    """

    by_access: dict[Access, Version]
    count: int
    overwritten: int


def versions_of(tensor_accesses: TensorAccesses, program: Program) -> Versions:
    """Find the versions of a tensor with an element that is written more than once.

    Raises:
        LanguageError: an element is written again before its value is read, or the version of an
            access is ambiguous.
    """
    events = _Events.from_accesses(tensor_accesses, program)
    events.refuse_unread()
    events.refuse_ambiguous()
    numbers = _VersionNumbers(events)
    overwritten = numbers.by_event[~events.is_last]
    same_tensor = [a for a in program.accesses if a.tensor.same_as(tensor_accesses.tensor)]
    unused = Version(tirx.IntImm("int32", 0), is_last=False)
    evaluated = tensor_accesses.footprints
    return Versions(
        {a: numbers.version_of(a) if a in evaluated else unused for a in same_tensor},
        int(numbers.by_event.max()) + 1, int(overwritten.max(initial=-1)) + 1,
    )  # fmt: skip


@dataclass(eq=False)
class _Events:
    """Accesses to cells in one launch, sorted by cell, then by time as if all blocks ran in
    lockstep.

    Attributes:
        accesses: the accesses of the kernel to the tensor.
        cell: the cell of each event.
        time: the timestamp of each event.
        access: the index in ``accesses`` of each event.
    """

    tensor_accesses: TensorAccesses
    timestamps: Timestamps
    grid: int
    accesses: list[Access]
    cell: np.ndarray
    time: np.ndarray
    access: np.ndarray

    @classmethod
    def from_accesses(cls, tensor_accesses: TensorAccesses, program: Program) -> _Events:
        accesses = [f.access for f in tensor_accesses.footprints.values()]
        timestamps = Timestamps(accesses, program, tensor_accesses.world_size)
        parts = []
        for number, footprints in enumerate(tensor_accesses.footprints.values()):
            axes = len(footprints.low)
            depth = len(footprints.access.loops)
            _, owner, *bounds, time = footprints.flat(timestamps.of_access(footprints, depth))
            time = time % timestamps.span
            for box, cell in tensor_accesses.grid.cells_in(owner, bounds[:axes], bounds[axes:]):
                parts.append((cell, time[box], np.full(len(cell), number)))
        cell, time, access = (np.concatenate(p) for p in zip(*parts, strict=True))
        rank = np.array([_ORDER[a.kind] for a in accesses])
        order = np.lexsort((rank[access], time, cell))
        grid = len(program.grid)
        columns = cell[order], time[order], access[order]
        return cls(tensor_accesses, timestamps, grid, accesses, *columns)

    def _is(self, kind: str) -> np.ndarray:
        return np.array([a.kind == kind for a in self.accesses])[self.access]

    @cached_property
    def writes(self) -> np.ndarray:
        """The events that are writes."""
        return np.flatnonzero(self._is("write"))

    @cached_property
    def rewrites(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of consecutive writes of one cell: the earlier writes, and the later ones."""
        earlier, later = self.writes[:-1], self.writes[1:]
        same_cell = self.cell[earlier] == self.cell[later]
        return earlier[same_cell], later[same_cell]

    @cached_property
    def _num_writes(self) -> np.ndarray:
        """Number of writes of the cell of each event."""
        return np.bincount(self.cell[self.writes], minlength=int(self.cell.max()) + 1)[self.cell]

    @cached_property
    def source(self) -> np.ndarray:
        """Write that produces the version of each event: the last one before it, or the only
        write of the cell; -1 if there is none."""
        index = np.searchsorted(self.writes, np.arange(len(self.cell)), "right") - 1
        previous = self.writes[np.maximum(index, 0)]
        has_previous = (index >= 0) & (self.cell[previous] == self.cell)
        following = self.writes[np.minimum(index + 1, len(self.writes) - 1)]
        return np.where(has_previous, previous, np.where(self._num_writes == 1, following, -1))

    @cached_property
    def is_last(self) -> np.ndarray:
        """Mask of the events that use the last version of their cell."""
        last = np.ones(len(self.cell), np.bool_)
        last[self.rewrites[0]] = False
        return last[self.source]

    def refuse_unread(self) -> None:
        """Refuse a second write of a cell that is not read between the two writes."""
        reads = np.cumsum(self._is("read"))
        earlier, later = self.rewrites
        unread = np.flatnonzero(reads[earlier] == reads[later])
        if unread.size:
            refuse_second_write(self.tensor_accesses, int(self.cell[earlier[unread[0]]]))

    def refuse_ambiguous(self) -> None:
        """Refuse an event with more than one possible version: a read before the first of several
        writes, unordered accesses of one statement, or an addition after a read of the version."""
        self._refuse_early()
        self._refuse_either()

    def _refuse_early(self) -> None:
        early = np.flatnonzero(self.source < 0)
        if early.size:
            user = self.accesses[self.access[early[0]]]
            later = self.writes[self.cell[self.writes] == self.cell[early[0]]]
            writers = dict.fromkeys(self.accesses[a] for a in self.access[later])
            raise LanguageError(
                f"{user.text}: {self._region(early[0])} is written {len(later)} times in one "
                f"launch, all of them after this access; expected a write before it"
                f"{arrows((a.kind, a.line) for a in (user, *writers))}"
            )

    def _refuse_either(self) -> None:
        kinds = np.array([_ORDER[a.kind] for a in self.accesses])[self.access]
        repeated = (self.cell[1:] == self.cell[:-1]) & (self._num_writes[1:] > 1)
        differ = repeated & (kinds[1:] != kinds[:-1])
        # A single statement reads before it writes.
        unordered = np.array([not is_leaf(a.anchor) for a in self.accesses])[self.access]
        together = differ & (self.time[1:] == self.time[:-1]) & unordered[1:]
        added = differ & (kinds[1:] == _ORDER["add"]) & (kinds[:-1] == _ORDER["read"])
        for is_refused, position in (
            (together, "in one statement of all threads"), (added, "after that"),
        ):  # fmt: skip
            for event in np.flatnonzero(is_refused)[:1]:
                first, second = (self.accesses[self.access[n]] for n in (event, event + 1))
                if second.combines:
                    region, times = self._region(event), int(self._num_writes[event])
                    refuse_combination(second, [first], region, times)
                raise LanguageError(
                    f"{first.text}, and {second.text} {position}, and {self._region(event)} is "
                    f"written {int(self._num_writes[event])} times in one launch: the read may see "
                    f"either version; {_EXPECTED}"
                    f"{arrows([(first.kind, first.line), (second.kind, second.line)])}"
                )

    def _region(self, event: int) -> str:
        return region_of(self.tensor_accesses, int(self.cell[event]))


class _VersionNumbers:
    """Numbers of the versions of a tensor.

    Attributes:
        first_version: the version of each write in the first iterations of the loops around it.
        versions_per_iteration: the number of versions that one iteration writes, by loop. Only
            loops that write a cell in several iterations are keys.
        by_event: the version of each event.
    """

    def __init__(self, events: _Events) -> None:
        self._events = events
        writes = [a for a in events.accesses if a.kind == "write"]
        self.first_version = dict.fromkeys(writes, 0)
        self.versions_per_iteration: dict[Loop, int] = {}
        self._repeated: set[Loop] = set()
        self._follows: set[tuple[Access, Access]] = set()
        self._compare()
        self._number(sorted(writes, key=lambda a: a.positions[events.grid :]), 0)
        number = np.zeros(len(events.cell), np.int64)
        for index, access in enumerate(events.accesses):
            if access in self.first_version:
                selected = events.access == index
                offset = self._offset(self._loops(access), events.time[selected])
                number[selected] = self.first_version[access] + offset
        number -= number[events.writes].min()
        self.by_event = number[events.source]

    def _compare(self) -> None:
        """Find what separates two consecutive writes of a cell: an iteration of a loop, or the
        order of two statements."""
        events = self._events
        earlier, later = events.rewrites
        digit = np.zeros(len(earlier), np.int64)
        for number, weight in reversed(list(enumerate(events.timestamps.weights))):
            digit[events.time[earlier] // weight != events.time[later] // weight] = number
        pairs = np.stack([events.access[earlier], events.access[later], digit])
        for a, b, number in np.unique(pairs, axis=1).T.tolist():
            if number % 2:
                self._repeated.add(events.accesses[a].loops[events.grid + number // 2])
            else:
                self._follows.add((events.accesses[a], events.accesses[b]))

    def _number(self, writes: Sequence[Access], level: int) -> int:
        """Number the writes inside the same ``level`` loops. Return the number of versions."""
        numbered: list[tuple[list[Access], int]] = []
        depth = self._events.grid + level

        def loop_or_access(access: Access) -> Loop | Access:
            return access.loops[depth] if depth < len(access.loops) else access

        for key, group in itertools.groupby(writes, loop_or_access):
            members = list(group)
            count = 1
            if isinstance(key, Loop):
                count = self._number(members, level + 1)
                if key in self._repeated:
                    self.versions_per_iteration[key] = count
                    count *= self._events.timestamps.max_iterations(members[0], level)
            ends = [
                end for earlier, end in numbered
                if any((a, b) in self._follows for a in earlier for b in members)
            ]  # fmt: skip
            first = max(ends, default=0)
            for access in members:
                self.first_version[access] += first
            numbered.append((members, first + count))
        return max(end for _, end in numbered)

    def _loops(self, access: Access) -> list[tuple[int, Loop]]:
        """Return the loops around an access whose iterations write versions, with their level."""
        loops = access.loops[self._events.grid :]
        counts = self.versions_per_iteration
        return [(level, loop) for level, loop in enumerate(loops) if loop in counts]

    def _offset(self, loops: Sequence[tuple[int, Loop]], time: np.ndarray) -> np.ndarray:
        """Count the versions between the first iterations of ``loops`` and the given times."""
        out = np.zeros(len(time), np.int64)
        for level, loop in loops:
            iteration = self._events.timestamps.iteration_of(time, level)
            out += self.versions_per_iteration[loop] * iteration
        return out

    def version_of(self, access: Access) -> Version:
        """Return the version of an access as an expression of the loops around it.

        Raises:
            LanguageError: no such expression exists.
        """
        events = self._events
        selected = np.flatnonzero(events.access == events.accesses.index(access))
        loops, number = self._loops(access), self.by_event[selected]
        for length in range(len(loops), -1, -1):
            for chosen in itertools.combinations(loops, length):
                first = number - self._offset(chosen, events.time[selected])
                if np.ptp(first) == 0:
                    version: tirx.PrimExpr = tirx.IntImm("int32", int(first[0]))
                    for _, loop in chosen:
                        version = version + _iteration(loop) * self.versions_per_iteration[loop]
                    return Version(version, self._is_last(access, selected, version))
        first = number - self._offset(loops, events.time[selected])
        sources = events.source[selected[[int(first.argmin()), int(first.argmax())]]]
        first_source, second_source = (events.accesses[a] for a in events.access[sources])
        raise LanguageError(
            f"{access.text}, which is in some iterations what {first_source.text}, in others what "
            f"{second_source.text}, in versions that no loop counts; {_EXPECTED}"
            f"{''.join(a.location for a in dict.fromkeys((access, first_source, second_source)))}"
        )

    def _is_last(
        self, access: Access, selected: np.ndarray, version: tirx.PrimExpr
    ) -> tirx.PrimExpr | bool | None:
        """Return the condition under which an access uses the last version of its cells: always,
        never, or from some version or iteration of a loop on."""
        is_last = self._events.is_last[selected]
        if is_last.all() or not is_last.any():
            return bool(is_last.all())
        candidates = [(version, self.by_event[selected])]
        for level, loop in enumerate(access.loops[self._events.grid :]):
            iteration = self._events.timestamps.iteration_of(self._events.time[selected], level)
            candidates.append((_iteration(loop), iteration))
        for expr, value in candidates:
            first = int(value[is_last].min())
            if first > value[~is_last].max():
                return expr >= first
        return None


def _iteration(loop: Loop) -> tirx.PrimExpr:
    return loop.var - loop.min
