"""Steps: compiled statements, of one set of threads or of several sets that interleave.

A step that may wait is a generator. It yields None where another block may run first, a ``Waiting``
where it must wait, and ``SPIN`` before each iteration of a loop that polls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .block import Frame, Mask

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
    """True if the condition was true and will not become true again."""
    targets: Callable[[], list[WaitTarget]] = list
    """Flags or barriers of the condition."""
    word: tuple[Any, tuple] | None = None
    """Tensor and index of the only word on which the condition depends."""
    holds: Callable[[Any], bool] = lambda value: True
    """True if the condition is true for a value of the word, or a phase of the barrier."""
    history: Callable[[], Any] = lambda: None
    """Values of the word that decides the condition: another list after each change; or None."""
    seen: Any = None
    """History when the condition was last evaluated."""
    place: str = ""
    """Block of which other threads wait for nothing, and continue after the branch."""
    obstacle: str = ""
    """What the simulator does not do, if the program itself may continue."""

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
            outer.join_exits(frame)
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
                outer.join_exits(frame)
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
                ended = outer.mask.count > sum(frame.mask.count for _, frame in running)
                yield Waiting(
                    lambda waits=waits: any(w.ready() for w in waits),
                    lambda waits=waits: "\n  ".join(w.text() for w in waits),
                    lambda waits=waits: any(w.passed() for w in waits),
                    lambda waits=waits: [target for w in waits for target in w.targets()],
                    place=outer.block.place if ended else "",
                    obstacle=next((w.obstacle for w in waits if w.obstacle), ""),
                )


def before_barrier(step: Step, barrier: str) -> Step:
    """Return a branch before a barrier of the block: in a report of a deadlock, threads that do not
    wait in the branch wait at the barrier."""
    if not step.waits:
        return step

    def noted(waiting: Waiting) -> Waiting:
        others = f"\n  other threads of {waiting.place} wait at the {barrier}"
        return replace(waiting, text=lambda: f"{waiting.text()}{others}", place="")

    def wait(frame: Frame) -> Iterator[Any]:
        for event in step.run(frame):
            yield noted(event) if isinstance(event, Waiting) and event.place else event

    return Step(wait, True)


class Meeting:
    """One execution of a statement by parts of the threads of a block, together.

    Args:
        outer: the frame of all of these threads.
        parts: frames of the parts that have not ended.
        needs_all: whether the program itself needs all of these threads.
    """

    def __init__(
        self, step: Step, outer: Frame, parts: list[Frame], needs_all: bool, loc: str
    ) -> None:
        self._step, self._outer, self._parts = step, outer, parts
        self._needs_all, self._loc = needs_all, loc
        self._arrived: list[Frame] = []
        self._begun = self._ended = False

    def run(self, frame: Frame) -> Iterator[Any]:
        """Execute the statement with the other parts; the last one to arrive runs it for all."""
        self._arrived.append(frame)
        while not self._ended:
            if self._is_complete():
                yield from self._execute()
            else:
                yield self._waiting(frame)

    def _waiting(self, frame: Frame) -> Waiting:
        obstacle = (
            "a statement of all threads, which some of them execute while others wait before it, "
            "is not simulated; expected it before the branches of these threads, or in one of them"
            f"\n --> {self._loc}"
        )
        threads = f"{frame.mask.count} threads of {frame.block.place}"
        return Waiting(
            lambda: self._ended or self._is_complete(),
            lambda: f"{threads} wait for the others --> {self._loc}",
            obstacle="" if self._needs_all else obstacle,
        )

    def _is_complete(self) -> bool:
        return not self._begun and all(part in self._arrived for part in self._parts)

    def _execute(self) -> Iterator[Any]:
        self._begun = True
        active = np.logical_or.reduce([part.mask.on for part in self._arrived])
        frame = self._outer.fork(self._outer.mask.where(active))
        yield from go(self._step, frame)
        for part in self._arrived:
            part.join_exits(frame)
        self._ended = True


def each(steps: Callable[[Frame], Iterator[Step]], waits: bool) -> Step:
    """Return a step that runs the steps that ``steps`` yields, one after the other."""

    def run(frame: Frame) -> None:
        for step in steps(frame):
            step.run(frame)

    def wait(frame: Frame) -> Iterator[Any]:
        for step in steps(frame):
            yield from go(step, frame)

    return Step(wait, True) if waits else Step(run)


def sequence(steps: list[Step]) -> Step:
    """Return a step that runs ``steps`` until all lanes have left the iteration of a loop."""

    def until_left(frame: Frame) -> Iterator[Step]:
        for step in steps:
            yield step
            if frame.gone is not None and not frame.narrow(~frame.gone):
                return

    return each(until_left, any(s.waits for s in steps))


@contextmanager
def scope_of_exits(frame: Frame) -> Iterator[None]:
    """Enter a loop, whose exits concern no other loop, and after which its lanes run again."""
    before = frame.mask, frame.active, frame.broken, frame.gone
    frame.broken = frame.gone = None
    yield
    frame.mask, frame.active, frame.broken, frame.gone = before


def end_iteration(frame: Frame, mask: Mask, active: np.ndarray | None) -> bool:
    """End an iteration that began with these lanes. Return whether any have not left the loop."""
    if frame.gone is None:
        return True
    frame.mask, frame.active, left = mask, active, frame.broken
    frame.broken = frame.gone = None
    return left is None or frame.narrow(~left)
