"""Mutations of the synchronization in the host steps of a plan.

The steps are writes of words, waits for words, and waits of streams for other streams. One change
applies to all steps of one line of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...runtime.plans.steps import Copy, CopyValue, Step, WaitStream, WaitValue, WriteValue
from ...runtime.plans.traced_plan import TracedPlan

StepEdit = Callable[[list[Step]], list[Step]]
"""Edits the steps of one call on one rank."""


@dataclass(frozen=True)
class HostOperation:
    """Steps of one kind from one line of a plan."""

    kind: type[Step]
    loc: str
    name: str

    @property
    def file(self) -> str:
        return self.loc.rpartition(":")[0]

    @property
    def line(self) -> int:
        return int(self.loc.rpartition(":")[2])

    def has(self, step: Step) -> bool:
        return type(step) is self.kind and step.loc == self.loc and _name(step) == self.name


def host_operations(steps: Iterable[Step]) -> list[HostOperation]:
    """Return the operations that synchronize, given all steps of all calls of a plan."""
    kinds = (WriteValue, CopyValue, WaitValue, WaitStream)
    return list(
        dict.fromkeys(
            HostOperation(type(s), s.loc, _name(s)) for s in steps if isinstance(s, kinds)
        )
    )


def _name(step: Step) -> str:
    """Return the name of a step in the plan. Implicit steps fork or join streams."""
    if step.number == 0:
        return "fork" if step.stream is not None else "join"
    return step.op.removeprefix("p.")


def host_changes(op: HostOperation, world_size: int) -> Iterator[tuple[str, StepEdit]]:
    """Yield the name and the edit of each mutant of one operation."""
    yield "drop", lambda steps: [s for s in steps if not op.has(s)]
    writes = op.kind in (WriteValue, CopyValue)
    if writes:
        yield "write after", lambda steps: _before_copies(op, steps)
    if op.kind in (WriteValue, WaitValue):
        yield "value+1", _each(op, lambda s: replace(s, value=s.value + 1))
        yield "value-1", _each(op, lambda s: replace(s, value=s.value - 1))
    if writes and world_size > 1:
        yield "rank+1", _each(op, lambda s: replace(s, dst=_next_rank(s.dst)))


def _each(op: HostOperation, change: Callable[[Any], Step]) -> StepEdit:
    return lambda steps: [change(s) if op.has(s) else s for s in steps]


def _next_rank(region: Any) -> Any:
    """Return the same region in the part of the next rank, if the tensor is symmetric."""
    if not region.parameter.symmetric:
        return region
    rank, *rest = region.start
    return replace(region, start=((rank + 1) % region.whole[0], *rest))


def _before_copies(op: HostOperation, steps: list[Step]) -> list[Step]:
    """Move each step of an operation before the copy that precedes it in its stream."""
    out: list[Step] = []
    for step in steps:
        at = len(out)
        if op.has(step):
            copies = [
                i for i, s in enumerate(out) if isinstance(s, Copy) and s.stream == step.stream
            ]
            at = copies[-1] if copies else at
        out.insert(at, step)
    return out


class ChangedPlan(TracedPlan):
    """Plan whose steps are transformed by ``edit``."""

    def __init__(self, plan: TracedPlan, edit: StepEdit) -> None:
        self.__dict__.update(plan.__dict__)
        self._plan, self._edit = plan, edit

    def trace(self, *arguments: Any, **options: Any) -> list[Step]:
        return self._edit(self._plan.trace(*arguments, **options))
