"""Collectives of ``torch.distributed`` in the streams of simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.plans.steps import Collective as CollectiveStep
from ..memory.clock import Clock
from ..memory.memory import Tensor
from ..memory.order import SYS, BlockOrder, of_group
from ..report.errors import SimulationError
from .group import Group
from .steps import Waiting, WaitTarget
from .streams import ByStream

if TYPE_CHECKING:
    from .machine import Machine


@dataclass
class Meeting:
    """A collective that some ranks of a group have begun.

    Attributes:
        parts: values of each rank's source, with a mask of those that are poison, or None.
        works: the step of each rank.
        clock: all that happens before the begin of these ranks.
    """

    parts: dict[int, tuple[np.ndarray, Any]] = field(default_factory=dict)
    works: dict[int, Collective] = field(default_factory=dict)
    clock: Clock | None = None


@dataclass
class Communicator:
    """Ranks of a group, whose collectives match in the order in which each host enqueues them.

    As in NCCL, those of one rank run one after the other, on whatever streams they are.
    """

    group: Group
    meetings: dict[int, Meeting] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    """Number of collectives of each rank that have ended."""

    def turn_of(self, rank: int) -> int:
        """Return the number of the collective that a rank runs now or next."""
        return self.ended.get(rank, 0)

    def end(self, rank: int, number: int) -> None:
        """Note that a collective has ended on a rank; forget it if it has ended on all."""
        self.ended[rank] = number + 1
        if all(self.turn_of(other) > number for other in self.group.ranks):
            del self.meetings[number]

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not begun a collective."""
        return [rank for rank in self.group.ranks if rank not in self.meetings[number].parts]


@dataclass(eq=False, kw_only=True)
class Collective(ByStream):
    """Collective of one rank: it begins, waits until all ranks of the group have begun, and writes
    the result.

    NCCL may read the source and write the destination at any time from the begin to the end, so
    both are accessed at both points. Other ranks end at other times: the collective orders what
    follows it on one rank after the begin of the others, not after their end.
    """

    step: CollectiveStep
    dst: Tensor
    src: Tensor
    among: Group
    """Ranks that take part."""
    sequence: int
    """Number among the collectives of the group that the host of this rank enqueues."""

    @property
    def _rank(self) -> int:
        return self.stream.rank

    def _steps(self, machine: Machine, order: BlockOrder) -> Iterator[Any]:
        communicator = machine.communicator(self.among)
        yield None
        yield from self._wait_for_turn(machine, communicator)
        meeting = self._begin(machine, communicator, order)
        yield from self._wait_for_others(machine, communicator)
        assert meeting.clock is not None
        order.join((0,), meeting.clock)
        yield None
        self.src.read(self.step.src.key, self._access(order))
        values, poison = self._result(meeting)
        self.dst.write(self.step.dst.key, values, self._access(order), poison)
        communicator.end(self._rank, self.sequence)
        machine.note_sync(self._turn(self.sequence + 1), True, 0)

    def _begin(self, machine: Machine, communicator: Communicator, order: BlockOrder) -> Meeting:
        """Publish the source, and all that happens before. The destination keeps its values."""
        meeting = communicator.meetings.setdefault(self.sequence, Meeting())
        for other in list(meeting.works.values())[:1]:
            self._require_equal(other)
        values, poison = self.src.read(self.step.src.key, self._access(order))
        if poison is not None and not self.dst.symmetric:
            raise SimulationError(
                "poison",
                f"{self.title} in {self.doer} in launch {self.epoch} "
                f"reads {self.step.src}, which is partly uninitialized --> {self.loc}",
            )
        meeting.parts[self._rank] = _copied(values, poison)
        key = self.step.dst.key
        values, poison = _copied(*self.dst.contents(key))
        self.dst.write(key, values, self._access(order), poison)
        meeting.works[self._rank] = self
        meeting.clock = order.published((0,), SYS, meeting.clock)
        machine.note_sync(self._arrivals, True, 0)
        return meeting

    def _wait_for_turn(self, machine: Machine, communicator: Communicator) -> Iterator[Any]:
        def is_turn() -> bool:
            return communicator.turn_of(self._rank) == self.sequence

        def text() -> str:
            return f"{self._begin_of_text()} an earlier collective of this rank --> {self.loc}"

        if self.among.size > 1 and (not is_turn() or machine.pauses_at_waits):
            yield self._waiting(is_turn, text, "earlier collective")
            machine.note_sync(self._turn(self.sequence), False, 0)

    def _wait_for_others(self, machine: Machine, communicator: Communicator) -> Iterator[Any]:
        def text() -> str:
            missing = ", ".join(f"rank {r}" for r in communicator.missing(self.sequence))
            return f"{self._begin_of_text()} others: not begun: {missing} --> {self.loc}"

        if communicator.missing(self.sequence) or machine.pauses_at_waits:
            yield self._waiting(
                lambda: not communicator.missing(self.sequence), text, "all ranks begun"
            )
            machine.note_sync(self._arrivals, False, 0)

    def _waiting(self, ready: Any, text: Any, wanted: str) -> Waiting:
        target = WaitTarget(self.step.title, self.loc, wanted=wanted)
        return Waiting(ready, text, targets=lambda: [target], holds=lambda _: False)

    def _begin_of_text(self) -> str:
        return (
            f"{self.doer} in launch {self.epoch} waits in {self.step.title}, number "
            f"{self.sequence + 1}{of_group(self.among.name)}, for"
        )

    @property
    def _arrivals(self) -> tuple:
        return ("collective", self.among, self.sequence)

    def _turn(self, sequence: int) -> tuple:
        return ("turn", self.among, self._rank, sequence)

    def _require_equal(self, other: Collective) -> None:
        own, theirs = self._signature, other._signature
        if own != theirs:
            raise SimulationError(
                "arrival",
                f"rank {self._rank} makes {own} in launch {self.epoch} --> {self.loc}\n"
                f"rank {other._rank} makes {theirs} in launch {other.epoch} --> {other.loc}\n"
                f"as number {self.sequence + 1}{of_group(self.among.name)}; expected the same "
                "collective, type and number of elements on all its ranks",
            )

    @property
    def _signature(self) -> str:
        src = self.step.src
        return f"{self.step.title} of {int(np.prod(src.extent))} elements of {src.dtype}"

    def _result(self, meeting: Meeting) -> tuple[np.ndarray, Any]:
        """Return the values of the destination, and a mask of those that are poison, or None."""
        parts = [meeting.parts[rank] for rank in self.among.ranks]
        if self.step.kind.scatters:
            own = self.among.ranks.index(self._rank)
            parts = [(v[own], None if p is None else p[own]) for v, p in parts]
        gathers, values = self.step.kind.gathers, [v for v, _ in parts]
        data = np.stack(values) if gathers else reduce(np.add, values)
        if all(p is None for _, p in parts):
            return data, None
        masks = [np.zeros(v.shape, np.bool_) if p is None else p for v, p in parts]
        return data, np.stack(masks) if gathers else reduce(np.logical_or, masks)


def _copied(values: Any, poison: Any) -> tuple[np.ndarray, Any]:
    return np.array(values), None if poison is None else np.array(poison)
