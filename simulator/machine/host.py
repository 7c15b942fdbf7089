"""Host of one simulated rank: what it enqueues in its streams."""

from __future__ import annotations

from typing import Any

from ...runtime.plans.regions import Region
from ...runtime.plans.steps import name_of_stream
from ..memory.memory import Tensor
from .machine import Machine
from .streams import Event, Record, WaitEvent


class Host:
    """Streams of one rank while its host enqueues operations in them.

    Attributes:
        enqueue_index: number of steps so far.
    """

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.enqueue_index = machine, rank, 0
        self._queues: dict[str | None, list[Any]] = {stream: [] for stream in machine.layout.first}

    def queue(self, stream: str | None) -> list[Any]:
        """Return the operations of a stream."""
        return self._queues.setdefault(stream, [])

    def tensor(self, region: Region) -> Tensor:
        """Return the tensor of this rank that a region of the plan is a part of."""
        return self.machine.named[region.parameter.name][self.rank]

    def wait(self, stream: str | None, other: str | None, epoch: int, loc: str) -> None:
        """Let a stream wait for what another one contains now."""
        event = Event(name_of_stream(other))
        self.queue(other).append(Record(event, epoch))
        self.queue(stream).append(WaitEvent(event, epoch, loc))

    def close(self) -> None:
        """Add the streams to the machine."""
        for name, items in self._queues.items():
            self.machine.add_stream(self.rank, name, items)
