"""A tensor that is written again behind the reads of what it held: each round gets its own copy.

What a read sees is settled by the text of the program: it is what it would see if all blocks of all
ranks ran each statement together. Each write of an element begins another round of it; a read, and
an addition, belongs to the round of the last write before it. Rounds are numbered through the
program, and the number of an access is an expression of the loops around it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.walk import arrows
from ..regions.accesses import Access, Program
from ..regions.schedule import Timestamps
from ..regions.space import Loop
from ..regions.tensor_accesses import TensorAccesses, refuse_second_write, region_of

_ORDER = {"read": 0, "write": 1, "add": 2}
"""In what order one statement does what it does."""
_EXPECTED = "expected another tensor for it, or signals and waits written by hand"


@dataclass(frozen=True)
class Round:
    """The round of an access.

    Attributes:
        number: of the round, an expression of the loops around the access.
        kept: whether nobody writes again what it touches, a condition; None where none says it.
    """

    number: tirx.PrimExpr
    kept: tirx.PrimExpr | bool | None


@dataclass(frozen=True)
class Rounds:
    """The rounds of a tensor.

    Attributes:
        of: each access's.
        count: how many there are.
        overwritten: how many, from the first on, hold something that is written again.
    """

    of: dict[Access, Round]
    count: int
    overwritten: int


def rounds_of(traffic: TensorAccesses, program: Program) -> Rounds:
    """The rounds of a tensor of which an element is written more than once.

    Raises:
        LanguageError: an element is written again before what it holds is read, or it is not
            settled to what round an access belongs.
    """
    events = _Events.of(traffic, program)
    events.refuse_unread()
    events.refuse_unsettled()
    numbers = _Numbers(events)
    each = numbers.each
    kept = events.is_last
    mine = [a for a in program.accesses if a.tensor.same_as(traffic.tensor)]
    never = Round(tirx.IntImm("int32", 0), kept=False)
    return Rounds(
        {a: numbers.round_of(a) if a in traffic.footprints else never for a in mine},
        int(each.max()) + 1, int(each[~kept].max(initial=-1)) + 1,
    )  # fmt: skip


@dataclass(eq=False)
class _Events:
    """All that touches cells in a launch, by cell, and by moment as if all blocks ran in step.

    Attributes:
        cell, moment, access: of each event; the access as an index.
    """

    traffic: TensorAccesses
    moments: Timestamps
    grid: int
    accesses: list[Access]
    cell: np.ndarray
    moment: np.ndarray
    access: np.ndarray

    @classmethod
    def of(cls, traffic: TensorAccesses, program: Program) -> _Events:
        accesses = [b.access for b in traffic.footprints.values()]
        moments = Timestamps(accesses, program, traffic.world_size)
        parts = []
        for number, footprints in enumerate(traffic.footprints.values()):
            axes = len(footprints.low)
            depth = len(footprints.access.loops)
            _, home, *bounds, moment = footprints.flat(moments.of(footprints, depth))
            moment = moment % moments.span
            for box, cell in traffic.grid.cells_in(home, bounds[:axes], bounds[axes:]):
                parts.append((cell, moment[box], np.full(len(cell), number)))
        cell, moment, access = (np.concatenate(p) for p in zip(*parts, strict=True))
        rank = np.array([_ORDER[a.kind] for a in accesses])
        order = np.lexsort((rank[access], moment, cell))
        grid = len(program.grid)
        return cls(traffic, moments, grid, accesses, cell[order], moment[order], access[order])

    def _is(self, kind: str) -> np.ndarray:
        return np.array([a.kind == kind for a in self.accesses])[self.access]

    @cached_property
    def writes(self) -> np.ndarray:
        """The events that are writes."""
        return np.flatnonzero(self._is("write"))

    @cached_property
    def again(self) -> tuple[np.ndarray, np.ndarray]:
        """Each write of a cell that is written again, and the next one."""
        one, other = self.writes[:-1], self.writes[1:]
        same = self.cell[one] == self.cell[other]
        return one[same], other[same]

    @cached_property
    def _times(self) -> np.ndarray:
        """How often the cell of each event is written."""
        return np.bincount(self.cell[self.writes], minlength=int(self.cell.max()) + 1)[self.cell]

    @cached_property
    def source(self) -> np.ndarray:
        """The write that each event sees or makes: the last one before it, or the only one."""
        at = np.searchsorted(self.writes, np.arange(len(self.cell)), "right") - 1
        before = self.writes[np.maximum(at, 0)]
        known = (at >= 0) & (self.cell[before] == self.cell)
        behind = self.writes[np.minimum(at + 1, len(self.writes) - 1)]
        return np.where(known, before, np.where(self._times == 1, behind, -1))

    @cached_property
    def is_last(self) -> np.ndarray:
        """Whether nobody writes again what each event touches."""
        last = np.ones(len(self.cell), np.bool_)
        last[self.again[0]] = False
        return last[self.source]

    def refuse_unread(self) -> None:
        """Refuse a write of what nobody has read since the write before."""
        reads = np.cumsum(self._is("read"))
        one, other = self.again
        unread = np.flatnonzero(reads[one] == reads[other])
        if unread.size:
            refuse_second_write(self.traffic, int(self.cell[one[unread[0]]]))

    def refuse_unsettled(self) -> None:
        """Refuse a read before the first of several writes; accesses of one statement of which it
        is not known which comes first; and an addition to what has been read."""
        early = np.flatnonzero(self.source < 0)
        if early.size:
            user = self.accesses[self.access[early[0]]]
            later = self.writes[self.cell[self.writes] == self.cell[early[0]]]
            writers = dict.fromkeys(self.accesses[a] for a in self.access[later])
            raise LanguageError(
                f"{user.text}: {self._region(early[0])} is written {len(later)} times in one "
                f"launch, all of them behind this; expected a write before it"
                f"{arrows((a.kind, a.line) for a in (user, *writers))}"
            )
        kinds = np.array([_ORDER[a.kind] for a in self.accesses])[self.access]
        several = (self.cell[1:] == self.cell[:-1]) & (self._times[1:] > 1)
        differ = several & (kinds[1:] != kinds[:-1])
        many = np.array([not _is_single(a.anchor) for a in self.accesses])[self.access]
        together = differ & (self.moment[1:] == self.moment[:-1]) & many[1:]
        added = differ & (kinds[1:] == _ORDER["add"]) & (kinds[:-1] == _ORDER["read"])
        for found, what in ((together, "in one statement of all threads"), (added, "after that")):
            for at in np.flatnonzero(found)[:1]:
                one, other = (self.accesses[self.access[n]] for n in (at, at + 1))
                raise LanguageError(
                    f"{one.text}, and {other.text} {what}, and "
                    f"{self._region(at)} is written {int(self._times[at])} times in one launch: "
                    f"what is read may be of either round; {_EXPECTED}"
                    f"{arrows([(one.kind, one.line), (other.kind, other.line)])}"
                )

    def _region(self, event: int) -> str:
        return region_of(self.traffic, int(self.cell[event]))


class _Numbers:
    """Numbers rounds.

    Attributes:
        first: the number of each write in the first iterations of the loops around it.
        rounds: of each loop that writes a cell in several iterations, how many one iteration is.
        each: the number of each event.
    """

    def __init__(self, events: _Events) -> None:
        self._events = events
        writes = [a for a in events.accesses if a.kind == "write"]
        self.first = dict.fromkeys(writes, 0)
        self.rounds: dict[Loop, int] = {}
        self._repeated: set[Loop] = set()
        self._follows: set[tuple[Access, Access]] = set()
        self._compare()
        self._number(sorted(writes, key=lambda a: a.place[events.grid :]), 0)
        number = np.zeros(len(events.cell), np.int64)
        for index, access in enumerate(events.accesses):
            if access in self.first:
                mine = events.access == index
                number[mine] = self.first[access] + self._of_loops(
                    self._loops(access), events.moment[mine]
                )
        number -= number[events.writes].min()
        self.each = number[events.source]

    def _compare(self) -> None:
        """Find what separates each write of a cell from the next: an iteration of a loop, or the
        order of two statements."""
        events = self._events
        one, other = events.again
        digit = np.zeros(len(one), np.int64)
        for number, weight in reversed(list(enumerate(events.moments.weights))):
            digit[events.moment[one] // weight != events.moment[other] // weight] = number
        pairs = np.stack([events.access[one], events.access[other], digit])
        for a, b, number in np.unique(pairs, axis=1).T.tolist():
            if number % 2:
                self._repeated.add(events.accesses[a].loops[events.grid + number // 2])
            else:
                self._follows.add((events.accesses[a], events.accesses[b]))

    def _number(self, writes: Sequence[Access], level: int) -> int:
        """Number writes inside the same ``level`` loops; how many rounds they are."""
        done: list[tuple[list[Access], int]] = []
        depth = self._events.grid + level

        def of(access: Access) -> Loop | Access:
            return access.loops[depth] if depth < len(access.loops) else access

        for what, group in itertools.groupby(writes, of):
            inside = list(group)
            count = 1
            if isinstance(what, Loop):
                count = self._number(inside, level + 1)
                if what in self._repeated:
                    self.rounds[what] = count
                    count *= self._events.moments.max_iterations(inside[0], level)
            before = [
                end for earlier, end in done
                if any((a, b) in self._follows for a in earlier for b in inside)
            ]  # fmt: skip
            first = max(before, default=0)
            for access in inside:
                self.first[access] += first
            done.append((inside, first + count))
        return max(end for _, end in done)

    def _loops(self, access: Access) -> list[tuple[int, Loop]]:
        """The loops around an access whose iterations are rounds, with their level."""
        around = access.loops[self._events.grid :]
        return [(level, loop) for level, loop in enumerate(around) if loop in self.rounds]

    def _of_loops(self, loops: Sequence[tuple[int, Loop]], moment: np.ndarray) -> np.ndarray:
        """How many rounds later a moment is than the first iterations of ``loops``."""
        out = np.zeros(len(moment), np.int64)
        for level, loop in loops:
            out += self.rounds[loop] * self._events.moments.iteration_of(moment, level)
        return out

    def round_of(self, access: Access) -> Round:
        """The round of an access as an expression of the loops around it.

        Raises:
            LanguageError: there is none.
        """
        events = self._events
        mine = np.flatnonzero(events.access == events.accesses.index(access))
        loops, number = self._loops(access), self.each[mine]
        for some in range(len(loops), -1, -1):
            for chosen in itertools.combinations(loops, some):
                first = number - self._of_loops(chosen, events.moment[mine])
                if np.ptp(first) == 0:
                    said: tirx.PrimExpr = tirx.IntImm("int32", int(first[0]))
                    for _, loop in chosen:
                        said = said + _iteration(loop) * self.rounds[loop]
                    return Round(said, self._kept(access, mine, said))
        first = number - self._of_loops(loops, events.moment[mine])
        of_two = events.source[mine[[int(first.argmin()), int(first.argmax())]]]
        one, other = (events.accesses[a] for a in events.access[of_two])
        raise LanguageError(
            f"{access.text}, which is in some iterations what {one.text}, in others what "
            f"{other.text}, in rounds that no loop counts; {_EXPECTED}"
            f"{''.join(a.location for a in dict.fromkeys((access, one, other)))}"
        )

    def _kept(
        self, access: Access, mine: np.ndarray, number: tirx.PrimExpr
    ) -> tirx.PrimExpr | bool | None:
        """When nobody writes again what an access touches: always, never, or from some round or
        iteration of a loop on."""
        kept = self._events.is_last[mine]
        if kept.all() or not kept.any():
            return bool(kept.all())
        known = [(number, self.each[mine])]
        for level, loop in enumerate(access.loops[self._events.grid :]):
            iteration = self._events.moments.iteration_of(self._events.moment[mine], level)
            known.append((_iteration(loop), iteration))
        for said, value in known:
            first = int(value[kept].min())
            if first > value[~kept].max():
                return said >= first
        return None


def _iteration(loop: Loop) -> tirx.PrimExpr:
    return loop.var - loop.min


def _is_single(anchor: tirx.Stmt) -> bool:
    """Whether an anchor is one statement, which reads before it writes."""
    return isinstance(anchor, (tirx.Evaluate, tirx.BufferStore, tirx.Bind))
