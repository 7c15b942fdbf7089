"""Steps: compiled statements, of one set of threads or of several sets that interleave.

A step that may wait is a generator. It yields None where another block may run first, a ``Waiting``
where it must wait, and ``SPIN`` before each iteration of a loop that polls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .block import Frame

SPIN = "spin"


class Step(NamedTuple):
    """A compiled statement; ``run`` is a generator function if it ``waits``."""

    run: Callable[[Frame], Any]
    waits: bool = False


@dataclass(frozen=True)
class WaitTarget:
    """Flag or barrier for which a block or a stream waits, for traces.

    Attributes:
        flag, tensor: the word, such as ``flags[1, 0]``, and its tensor; "" for a barrier.
        seen: its value now.
        wanted: the condition.
    """

    op: str
    loc: str
    flag: str = ""
    tensor: str = ""
    seen: Any = None
    wanted: str = ""


@dataclass
class Waiting:
    """Condition for which a block or a stream waits."""

    ready: Callable[[], bool]
    text: Callable[[], str]
    passed: Callable[[], bool] = lambda: False
    """Whether the condition was true and will not become true again."""
    targets: Callable[[], list[WaitTarget]] = list
    """Flags or barriers of the condition."""
    word: tuple[Any, tuple] | None = None
    """Tensor and index of the only word on which the condition depends."""
    holds: Callable[[Any], bool] = lambda value: True
    """Whether the condition is true for a value of the word, or a phase of the barrier."""
    history: Callable[[], Any] = lambda: None
    """Values of the word that decides the condition: another list after each change; or None."""
    seen: Any = None
    """History when the condition was last evaluated."""

    def may_end(self) -> bool:
        """Return whether the condition is true. Evaluate it only after a change of its word."""
        history = self.history()
        if history is not None and history is self.seen:
            return False
        self.seen = history
        return self.ready()


def go(step: Step, frame: Frame) -> Iterator[Any]:
    """Run any step as a generator."""
    if step.waits:
        yield from step.run(frame)
    else:
        step.run(frame)


def together(parts: list[tuple[Step, Frame]], outer: Frame) -> Iterator[Any]:
    """Interleave steps of different threads of a block until all have finished."""
    running = [(go(step, frame), frame) for step, frame in parts]
    ended = outer.block.machine.fork(running)
    if ended is not None:
        yield ended
        for _, frame in running:
            if frame.broken is not None:
                outer.broken = _union(outer.broken, frame.broken)
        return
    blocked: dict[int, Waiting] = {}
    while running:
        for number, (generator, frame) in enumerate(running):
            if number in blocked:
                if not blocked[number].ready():
                    continue
                del blocked[number]
            frame.newest = outer.newest
            event = next(generator, running)
            if event is running:
                if frame.broken is not None:
                    outer.broken = _union(outer.broken, frame.broken)
                running.pop(number)
                blocked = {}
                break
            if isinstance(event, Waiting):
                blocked[number] = event
            else:
                yield event
        else:
            if len(blocked) == len(running):
                waits = list(blocked.values())
                yield Waiting(
                    lambda waits=waits: any(w.ready() for w in waits),
                    lambda waits=waits: "\n".join(w.text() for w in waits),
                    lambda waits=waits: any(w.passed() for w in waits),
                    lambda waits=waits: [target for w in waits for target in w.targets()],
                )


def _union(one: Any, other: Any) -> Any:
    return other if one is None else type(one)(one.on | other.on, one.group_of)


def leave(frame: Frame) -> bool:
    """Deactivate the threads that left the loop. Return whether any are left."""
    frame.mask = frame.mask.where(~frame.broken.on)
    return frame.mask.count > 0


def sequence(steps: list[Step]) -> Step:
    if not any(s.waits for s in steps):
        return Step(lambda frame: [s.run(frame) for s in steps])

    def wait(frame):
        for step in steps:
            yield from go(step, frame)

    return Step(wait, True)
