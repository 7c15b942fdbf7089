"""Steps: statements ready to run, of one thread set or several side by side.

A step that may have to wait is a generator: it yields None where another block may go on first,
a ``Waiting`` where it cannot go on yet, and ``SPIN`` after a round of a loop that polls.
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


@dataclass
class Waiting:
    """What a block or a stream cannot go on without."""

    ready: Callable[[], bool]
    text: Callable[[], str]
    passed: Callable[[], bool] = lambda: False
    """Whether what it waits for was there and will not come back."""


def go(step: Step, frame: Frame) -> Iterator[Any]:
    """Run any step as a generator."""
    if step.waits:
        yield from step.run(frame)
    else:
        step.run(frame)


def together(parts: list[tuple[Step, Frame]], outer: Frame) -> Iterator[Any]:
    """Run steps of different threads of a block side by side until all are through."""
    running = [(go(step, frame), frame) for step, frame in parts]
    standing: dict[int, Waiting] = {}
    while running:
        for number, (generator, frame) in enumerate(running):
            if number in standing:
                if not standing[number].ready():
                    continue
                del standing[number]
            frame.newest = outer.newest
            event = next(generator, running)
            if event is running:
                if frame.broken is not None:
                    outer.broken = _union(outer.broken, frame.broken)
                running.pop(number)
                standing = {}
                break
            if isinstance(event, Waiting):
                standing[number] = event
            else:
                yield event
        else:
            if len(standing) == len(running):
                held = list(standing.values())
                yield Waiting(
                    lambda held=held: any(w.ready() for w in held),
                    lambda held=held: "\n".join(w.text() for w in held),
                    lambda held=held: any(w.passed() for w in held),
                )


def _union(one: Any, other: Any) -> Any:
    return other if one is None else type(one)(one.on | other.on, one.class_of)


def leave(frame: Frame) -> bool:
    """Take the threads that broke out of the loop off the way; whether any are left."""
    frame.mask = frame.mask.where(~frame.broken.on)
    return frame.mask.count > 0


def sequence(steps: list[Step]) -> Step:
    if not any(s.waits for s in steps):
        return Step(lambda frame: [s.run(frame) for s in steps])

    def wait(frame):
        for step in steps:
            yield from go(step, frame)

    return Step(wait, True)
