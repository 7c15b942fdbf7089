"""Barriers of several blocks: of a grid, of all ranks, or of one block per rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..memory.clock import Clock
from ..memory.order import SYS
from ..report.errors import SimulationError
from .block import Block, Frame
from .steps import Waiting, WaitTarget

if TYPE_CHECKING:
    from .machine import Machine


@dataclass
class Phase:
    """One use of a barrier: the members that have not arrived, and the clock of the others."""

    number: int
    missing: dict[tuple, None]
    clock: Clock | None = None


@dataclass
class GroupBarrier:
    """A barrier of several blocks, which may be used again after all members have arrived."""

    machine: Machine
    participants: str
    phase: Phase = field(default_factory=lambda: Phase(0, {}))
    arrived_in: dict[Any, int] = field(default_factory=dict)
    """Block of a rank that arrived, by launch, if one block of each rank participates."""

    @property
    def per_rank(self) -> bool:
        """True if one block of each rank participates."""
        return self.participants == "ranks"

    def arrive_and_wait(self, frame: Frame, op: str, loc: str) -> Iterator[Any]:
        block = frame.block
        me = (block.rank,) if self.per_rank else (block.rank, block.number)
        launch = block.launch
        if self.per_rank and self.arrived_in.setdefault(launch, block.number) != block.number:
            raise SimulationError(
                "arrival",
                f"{op} is reached by blocks {self.arrived_in[launch]} and {block.number} of rank "
                f"{block.rank} in launch {block.epoch}; expected one block a launch, or "
                "a barrier= of its own for each block\n"
                f" --> {loc}",
            )
        if not self.phase.missing:
            self.phase = Phase(self.phase.number + 1, dict.fromkeys(self._members(block)))
        phase = self.phase
        phase.missing.pop(me, None)
        phase.clock = block.order.published(frame.mask.thread_groups, SYS, phase.clock)
        self.machine.memory.version += 1
        name = ("barrier", id(self), phase.number)
        self.machine.note_sync(name, True, 0)

        def text() -> str:
            missing = list(phase.missing)[:8]
            members = "; ".join(
                f"rank {rank}" + "".join(f", block {b}" for b in number)
                for rank, *number in missing
            )
            return (
                f"{block.place} waits at {op}, phase {phase.number}: "
                f"not arrived: {members} --> {loc}"
            )

        if phase.missing or self.machine.pauses_at_waits:
            target = WaitTarget(op, loc, wanted=f"phase {phase.number}")
            yield Waiting(
                lambda: not phase.missing, text, targets=lambda: [target], holds=lambda _: False
            )
            self.machine.note_sync(name, False, 0)
        assert phase.clock is not None
        block.order.join(frame.mask.thread_groups, phase.clock)

    def _members(self, block: Block) -> list[tuple]:
        ranks = range(self.machine.world_size)
        if self.per_rank:
            return [(r,) for r in ranks]
        if self.participants == "grid":
            ranks = range(block.rank, block.rank + 1)
        return [(r, b) for r in ranks for b in range(block.launch.blocks)]
