"""Exhaustive simulation of one program: all interleavings, or as many as are allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..machine.machine import outputs_of
from ..memory.arrivals import refuse_surplus, unconsumed
from ..memory.threads import ThreadGroupSplit
from ..report.errors import SimulationError
from .machine import ExplorationRecorder, ExploringMachine
from .search import CutShort, Search

if TYPE_CHECKING:
    from ..case import Case

MAX_INTERLEAVINGS = 2000
"""Default of ``max_interleavings``."""
_CUT_SHORT = 4
"""Largest number of schedules that are cut short, per interleaving allowed."""


@dataclass
class Exploration:
    """Result of an exhaustive simulation without a fault.

    Attributes:
        program: name of the program.
        world_size: number of ranks.
        interleavings: number of interleavings explored. Two schedules are the same interleaving if
            they differ only in the order of steps that are independent of each other.
        complete: whether these are all interleavings; False if ``max_interleavings`` ended the
            exploration.
        cut_short: schedules not executed to their end, because they were like earlier ones.
        outcomes: the different results: one dict per rank, parameter name -> array.
    """

    program: str
    world_size: int
    interleavings: int = 0
    complete: bool = False
    cut_short: int = 0
    outcomes: list[list[dict[str, np.ndarray]]] = field(default_factory=list)

    def __str__(self) -> str:
        ranks = f"{self.program} for {self.world_size} ranks"
        free = "free of races and deadlocks"
        if not self.complete:
            return (
                f"{self.interleavings} interleavings of {ranks} explored, not all; these are {free}"
            )
        if self.interleavings == 1:
            return f"the only interleaving of {ranks} is {free}"
        return f"all {self.interleavings} interleavings of {ranks} are {free}"


class Exploring:
    """Exploration of the interleavings of one case.

    Args:
        records: whether to record each schedule, for a trace.
    """

    def __init__(
        self, case: Case, resident_blocks: int, max_interleavings: int, records: bool = False
    ) -> None:
        self.case, self.resident_blocks, self.most = case, resident_blocks, max_interleavings
        self.kind = ExplorationRecorder if records else ExploringMachine
        self.name = case.executable.plan.name
        self.machine: Any = None
        """Machine of the interleaving with a fault, or of the last one."""
        self.unread: dict[tuple, str] = {}
        """Warnings for signals that no interleaving waits for or reads."""

    def run(self, search: type[Search] = Search) -> Exploration:
        """Explore, from the start again whenever the threads of a block must be divided.

        Raises:
            SimulationError: the first fault.
        """
        while True:
            try:
                return self._explore(search())
            except ThreadGroupSplit as divided:
                self.case.divide(divided.group_of)

    def _explore(self, search: Search) -> Exploration:
        result = Exploration(self.name, self.case.executable.world_size)
        outcomes: dict[Any, list[dict[str, np.ndarray]]] = {}
        most_cut = _CUT_SHORT * self.most
        while not result.complete and result.interleavings < self.most:
            machine = self.case.machine(0, self.resident_blocks, self.kind)
            assert isinstance(machine, ExploringMachine)
            machine.follow(search)
            try:
                machine.run()
                refuse_surplus(machine.every_tensor())
            except CutShort:
                result.cut_short += 1
            except SimulationError as error:
                self.machine = machine
                _print(machine)
                error = self.case.explained(error, machine)
                raise error.in_interleaving(result.interleavings + 1) from None
            else:
                self.machine = machine
                result.interleavings += 1
                self._note(result.interleavings == 1, outcomes)
            result.complete = not search.advance()
            if result.cut_short >= most_cut:
                break
        result.outcomes = list(outcomes.values())
        return result

    def _note(self, is_first: bool, outcomes: dict[Any, Any]) -> None:
        """Note the results, the warnings and the output of an interleaving without a fault."""
        outputs = outputs_of(self.machine)
        key = tuple(array.tobytes() for rank in outputs for array in rank.values())
        outcomes.setdefault(key, outputs)
        signals = unconsumed(self.machine.every_tensor())
        if is_first:
            self.unread = signals
            _print(self.machine)
        self.unread = {k: v for k, v in self.unread.items() if k in signals}


def _print(machine: ExploringMachine) -> None:
    """Print what the program prints in this interleaving."""
    for text in machine.printed:
        print(text)
