"""Loops that poll: recognize an iteration after which the process is where it was before.

Such an iteration is no step of an interleaving. The process waits until a value that the iteration
read has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..machine.block import Block, Frame
from .search import Snapshot

if TYPE_CHECKING:
    from .machine import ExploringMachine


@dataclass
class PollStep:
    """A step of a process that has begun a loop that polls.

    Attributes:
        reads: what the step read; None if it changed something.
        chose: whether another alternative than the newest values was taken.
    """

    number: int
    reads: Snapshot | None
    chose: bool


class Polling:
    """Steps of one process since it began a loop that polls."""

    def __init__(self) -> None:
        self._began: dict[Any, int] = {}
        """Number of the step that ended in each state, before an iteration."""
        self._steps: list[PollStep] = []

    def add(self, step: PollStep) -> None:
        """Note a step of the process."""
        self._steps.append(step)

    def repeated(self, state: Any) -> list[PollStep] | None:
        """Return the steps since the process was in this state, if they changed nothing."""
        began = self._began.get(state)
        self._began[state] = self._steps[-1].number
        if began is None:
            return None
        steps = [step for step in self._steps if step.number > began]
        return steps if all(step.reads is not None for step in steps) else None


def state_of(coroutine: Any) -> Any:
    """Return the local state of a block between two steps: position, variables, shared memory."""
    positions, steps = [], coroutine.steps
    while steps is not None:
        frame = steps.gi_frame.f_locals.get("frame")
        mask = frame.mask.on.tobytes() if isinstance(frame, Frame) else None
        # The generator itself, not its address, which another loop may use later.
        positions.append((steps, steps.gi_frame.f_lasti, mask))
        steps = steps.gi_yieldfrom
    return tuple(positions), tuple(_variables(coroutine.frame.block))


def _variables(block: Block) -> Iterator[Any]:
    for value in block.env:
        yield _hashable(value)
    for slot, tile in sorted(block.tiles.items()):
        yield slot, _hashable(tile.data), _hashable(tile.poison)
    for slot, barriers in sorted(block.barriers.items()):
        yield slot, tuple((b.phase, b.arrived) for b in barriers)
    yield len(block.stores), len(block.loads)


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return value


def reads_of(machine: ExploringMachine, first: int) -> Snapshot | None:
    """Return what the accesses since event ``first`` read; None if they changed something."""
    snapshot: Snapshot = []
    for event in range(first, len(machine.memory.events.what)):
        _, _, tensor, key, _, writes = machine.memory.events.what[event]
        if writes and not _keeps_values(tensor, event):
            return None
        snapshot.append((machine.name_of(tensor), key, tensor.data[key].tobytes()))
    return snapshot


def _keeps_values(tensor: Any, event: int) -> bool:
    """Return whether an access was a read-modify-write that stored the value that was there."""
    changes = [c for of in tensor.changes.values() for c in of[-4:] if c.event == event]
    return bool(changes) and all(
        c.after is not None and np.asarray(c.before).tobytes() == np.asarray(c.after).tobytes()
        for c in changes
    )
