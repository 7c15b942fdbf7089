"""Waits of blocks and streams for a word of global memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...builtins.spec import RELATION_TEXT
from ..memory.arrivals import has_reached, is_passed, story
from ..memory.flagged import flag_of, had_flag
from ..memory.memory import Tensor
from ..report.errors import SimulationError
from .steps import Waiting, WaitTarget

if TYPE_CHECKING:
    from .machine import Machine


@dataclass
class WordWait:
    """Wait until a word of a tensor has a value.

    Attributes:
        relation: relation of the value to ``wanted``, such as ``ge``.
        flag: the word, such as ``flags[1, 0]``.
        op, loc: operation that waits.
        doer: the block or stream that waits, with its launch.
        unwritten: returns the error for an uninitialized word.
        sender: returns the rank that signals the word; negative if it is not known.
    """

    machine: Machine
    tensor: Tensor
    index: tuple
    relation: str
    wanted: Any
    flag: str
    op: str
    loc: str
    doer: str
    unwritten: Callable[[], SimulationError]
    sender: Callable[[], int] = lambda: -1

    def until_ready(self, look: Callable[[], Any]) -> Iterator[Waiting]:
        """Wait. ``look`` records one load for all loads that do not end the wait."""
        is_ready = self.ready()
        if not is_ready:
            look()
        if not is_ready or self.machine.pauses_at_waits:
            yield Waiting(
                self.ready, self.text, self.passed, self.targets, word=(self.tensor, self.index),
                holds=self.holds, history=self.tensor.history(self.index),
            )  # fmt: skip

    def ready(self) -> bool:
        entry = self.tensor.newest(self.index)
        if entry.poisoned:
            raise self.unwritten()
        return self.holds(entry.value)

    def holds(self, value: Any) -> bool:
        if self.relation == "reached":
            return has_reached(self.tensor, value, self.wanted)
        return bool(getattr(operator, self.relation)(value, self.wanted))

    @property
    def seen(self) -> Any:
        return self.tensor.newest(self.index).value

    @property
    def condition(self) -> str:
        return f"{RELATION_TEXT[self.relation]} {self.wanted}"

    def text(self) -> str:
        """Explain a wait that does not end."""
        rank = self.sender()
        return (
            f"{self.doer} {self._values()}" + (f", from rank {rank}" if rank >= 0 else "")
            + f" --> {self.loc}\n{self._story()}"
        )  # fmt: skip

    def passed(self) -> bool:
        return is_passed(self.tensor, self.index, self.relation, self.wanted)

    def targets(self) -> list[WaitTarget]:
        name = self.tensor.name
        return [WaitTarget(self.op, self.loc, self.flag, name, self.seen, self.condition)]

    def _values(self) -> str:
        values = f"value seen {self.seen}, value wanted {self.condition}"
        return f"waits at {self.op}({self.flag}): {values}"

    def _story(self) -> str:
        signals = self.machine.signals(self.tensor)
        return story(self.tensor, self.index, self.relation, self.wanted, signals)


class StreamWait(WordWait):
    """Wait of a stream until a word has reached a value."""

    @property
    def condition(self) -> str:
        return f">= {self.wanted}"


class FlagPoll(WordWait):
    """Poll until a word that holds data and a flag has this flag."""

    def holds(self, value: Any) -> bool:
        return flag_of(value) == self.wanted

    @property
    def seen(self) -> int:
        return flag_of(super().seen)

    @property
    def condition(self) -> str:
        return f"flag == {self.wanted}"

    def _values(self) -> str:
        return f"polls {self.op}({self.flag}): flag seen {self.seen}, flag wanted {self.wanted}"

    def _story(self) -> str:
        if not had_flag(self.tensor, self.index, self.wanted):
            return super()._story()
        overwritten = "    overwritten: it had this flag before the poll could see it"
        return f"{overwritten}\n{super()._story()}"
