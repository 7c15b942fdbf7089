"""Host of one simulated rank: it enqueues the steps of calls in its streams."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from ...runtime.plans.regions import Region
from ...runtime.plans.steps import Copy, Launch, Step, WaitStream, WaitValue, name_of_stream
from ..memory.memory import Tensor
from .machine import Machine
from .streams import Await, Event, Record, Transfer, WaitEvent, Work
from .streams import Launch as KernelLaunch


@dataclass(frozen=True)
class Call:
    """A call of a plan on one rank: its steps, each with its kernel launches.

    Attributes:
        written, multicasts: names of the tensors that it writes, or uses as multicast addresses.
    """

    epoch: int
    steps: list[tuple[Step, list[tuple]]]
    written: Set[str]
    multicasts: Set[str]


class Host:
    """Streams of one rank while its host enqueues operations in them.

    Attributes:
        enqueue_index: number of steps so far.
    """

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank, self.enqueue_index = machine, rank, 0
        self._queues: dict[str | None, list[Any]] = {stream: [] for stream in machine.layout.first}

    def enqueue(self, call: Call) -> None:
        """Enqueue the steps of one call."""
        for step, launches in call.steps:
            self.enqueue_index += 1
            if isinstance(step, WaitStream):
                event = Event(name_of_stream(step.other))
                self._queues[step.other].append(Record(event, call.epoch))
                self._queues[step.stream].append(WaitEvent(event, call.epoch, step.loc))
            else:
                self._queues[step.stream] += self._works(call.epoch, step, launches)

    def close(self) -> None:
        """Add the streams to the machine."""
        for name, items in self._queues.items():
            self.machine.add_stream(self.rank, name, items)

    def _works(self, epoch: int, step: Any, launches: list[tuple]) -> list[Work]:
        """Return the items of a step."""
        common: dict[str, Any] = {
            "epoch": epoch, "enqueue_index": self.enqueue_index, "loc": step.loc,
            "title": f"{step.title} (step {step.number})",
        }  # fmt: skip
        if isinstance(step, Launch):
            common["tensors"] = self._arguments(step)
            common["most_blocks"] = self.machine.most_blocks
            return [KernelLaunch(kernel=k, env=env, extents=n, **common) for k, env, n in launches]
        if isinstance(step, WaitValue):
            flag = self._tensor(step.flag)
            return [Await(step=step, flag=flag, takes_room=False, **common)]
        src = getattr(step, "src", None)
        return [
            Transfer(
                step=step, dst=self._tensor(step.dst),
                src=None if src is None else self._tensor(src),
                takes_room=isinstance(step, Copy) and self._owner(step.dst) == self._owner(src),
                **common,
            )
        ]  # fmt: skip

    def _arguments(self, launch: Launch) -> dict[str, Tensor]:
        """Return the tensors of a launch by parameter, with the implicit ones."""
        regions = {n: v for n, v in launch.arguments.items() if isinstance(v, Region)}
        tensors = {name: self._tensor(region) for name, region in regions.items()}
        implicit = self.machine.implicit.get(id(launch.program), {})
        return tensors | {name: of_ranks[self.rank] for name, of_ranks in implicit.items()}

    def _tensor(self, region: Region) -> Tensor:
        return self.machine.named[region.parameter.name][self.rank]

    def _owner(self, region: Region) -> int:
        return self.rank if region.rank is None else region.rank
