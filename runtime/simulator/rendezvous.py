"""Barriers wider than a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .block import Block, Frame
from .errors import SimulationError
from .steps import Waiting

if TYPE_CHECKING:
    from .machine import Machine


@dataclass
class Rendezvous:
    """A barrier wider than a block: the n-th arrival of each waits for the n-th of all."""

    machine: Machine
    per_rank: bool
    arrivals: dict[tuple, list[np.ndarray]] = field(default_factory=dict)
    arrived_in: dict[Any, int] = field(default_factory=dict)

    def meet(self, frame: Frame, op: str, site: str) -> Iterator[Any]:
        block = frame.block
        me = (block.rank,) if self.per_rank else (block.rank, block.number)
        launch = block.launch
        if self.per_rank and self.arrived_in.setdefault(launch, block.number) != block.number:
            raise SimulationError(
                "arrival",
                f"{op} is reached by blocks {self.arrived_in[launch]} and {block.number} of rank "
                f"{block.rank} in launch {block.epoch}; expected one block a launch\n --> {site}",
            )
        clock = np.zeros(0)
        for i in frame.mask.classes:
            (clock,) = block.order.release(i, 3).values()
        mine = self.arrivals.setdefault(me, [])
        mine.append(clock)
        turn = len(mine)
        self.machine.memory.version += 1
        members = self._members(op, block)

        def missing() -> list[tuple]:
            return [m for m in members if len(self.arrivals.get(m, ())) < turn]

        def text() -> str:
            who = "; ".join(_who(m) for m in missing()[:8])
            return (
                f"{block.name()} in launch {block.epoch} stands at {op}, meeting {turn}: not there "
                f"yet: {who} --> {site}"
            )

        if missing():
            yield Waiting(block, lambda: not missing(), text)
        for member in members:
            theirs = self.arrivals[member][turn - 1]
            for i in frame.mask.classes:
                np.maximum(block.order.clock[i], theirs, out=block.order.clock[i])

    def _members(self, op: str, block: Block) -> list[tuple]:
        ranks = range(self.machine.world_size)
        if self.per_rank:
            return [(r,) for r in ranks]
        if op == "W.sync_grid":
            ranks = range(block.rank, block.rank + 1)
        return [(r, b) for r in ranks for b in range(block.launch.blocks)]


def _who(member: tuple) -> str:
    return f"rank {member[0]}" + (f", block {member[1]}" if len(member) > 1 else "")
