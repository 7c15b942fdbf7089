"""W ranks with their memories and streams: which block goes on, and when nobody can."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .block import Block, Frame, Mask
from .errors import SimulationError
from .memory import Memory, Tensor
from .order import BlockOrder, Layout
from .program import Kernel
from .steps import SPIN, Waiting, go

_IDLE = 3
_SPINS = 5000
"""Rounds of a polling loop, with nothing changed anywhere, after which it makes room for others,
and after which nothing will change."""


@dataclass(eq=False)
class Coroutine:
    """A resident block."""

    block: Block
    frame: Frame
    steps: Iterator[Any]
    launch: Launch
    pace: float
    waiting: Waiting | None = None
    spins: int = 0
    """Rounds of a polling loop since anything changed anywhere."""
    spun_at: int = -1

    def spin(self, version: int) -> None:
        self.spins = self.spins + 1 if self.spun_at == version else 0
        self.spun_at = version

    def is_idle(self, version: int) -> bool:
        return self.spins >= _IDLE and self.spun_at == version


@dataclass(eq=False)
class Launch:
    """A kernel on one rank: the blocks that wait for room, and the order at its end."""

    rank: int
    epoch: int
    kernel: Kernel
    env: list
    extents: tuple[int, ...]
    start: np.ndarray
    end: np.ndarray
    next: int = 0
    running: int = 0

    @property
    def blocks(self) -> int:
        return int(np.prod(self.extents)) if self.extents else 1

    def index(self, number: int) -> tuple[int, ...]:
        out = []
        for extent in self.extents:
            out.append(number % extent)
            number //= extent
        return tuple(out)


@dataclass
class Rendezvous:
    """A barrier wider than a block: the n-th arrival of each waits for the n-th of all."""

    machine: Machine
    per_rank: bool
    arrivals: dict[tuple, list[np.ndarray]] = field(default_factory=dict)
    arrived_in: dict[tuple, int] = field(default_factory=dict)

    def meet(self, frame: Frame, op: str, site: str) -> Iterator[Any]:
        block = frame.block
        me = (block.rank,) if self.per_rank else (block.rank, block.number)
        launch = (block.rank, block.epoch, id(block.kernel))
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
        blocks = self.machine.streams[block.rank].launch.blocks
        return [(r, b) for r in ranks for b in range(blocks)]


def _who(member: tuple) -> str:
    return f"rank {member[0]}" + (f", block {member[1]}" if len(member) > 1 else "")


@dataclass(eq=False)
class Stream:
    """The launches of one rank, one after another."""

    rank: int
    launches: Iterator[tuple]
    clock: np.ndarray
    launch: Launch | None = None
    launched: int = 0


class Machine:
    """One schedule of one program."""

    def __init__(
        self, world_size: int, layout: Layout, seed: int, resident_blocks: int,
        thread_names: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.world_size, self.layout, self.resident_blocks = world_size, layout, resident_blocks
        self.rng = random.Random(seed)
        self.memory = Memory(layout, self.rng)
        self.memory.thread_names = thread_names
        self.tensors: dict[str, list[Tensor]] = {}
        self.streams: list[Stream] = []
        self._barriers: dict[Any, Rendezvous] = {}
        self._ready: list[Coroutine] = []
        self._held: list[Coroutine] = []
        self._checked = -1
        self._uneven = self.rng.random() < 0.5
        """Whether some blocks are much slower than others in this schedule."""

    def add_stream(self, rank: int, launches: Iterator[tuple]) -> None:
        """The launches of a rank: (epoch, kernel, environment, extents of the grid) each."""
        self.streams.append(Stream(rank, launches, np.zeros(self.layout.count, np.int32)))

    def barrier(self, op: str, words: Any, rank: int) -> Rendezvous:
        key = (op, words, rank if op == "sync_grid" else None)
        if key not in self._barriers:
            self._barriers[key] = Rendezvous(self, op == "sync_ranks")
        return self._barriers[key]

    def signallers(self, tensor: Tensor, index: tuple) -> str:
        """Who changed a flag last, for the report of who stands at it."""
        entry = tensor.newest(index)
        if entry.event == 0:
            return "nobody has changed it"
        return f"last changed by {self.memory.describe(entry.event)}"

    def run(self) -> None:
        """Until all launches have ended.

        Raises:
            SimulationError: a fault, with what led to it.
        """
        with np.errstate(all="ignore"):
            for stream in self.streams:
                self._next_launch(stream)
            while (coroutine := self._pick()) is not None:
                self._advance(coroutine)
        if self._held:
            raise self._deadlock()

    def _advance(self, coroutine: Coroutine) -> None:
        self._ready.remove(coroutine)
        event = next(coroutine.steps, self)
        if event is self:
            self._finish(coroutine)
        elif isinstance(event, Waiting):
            coroutine.waiting = event
            self._held.append(coroutine)
            self._checked = -1
        else:
            if event is SPIN:
                coroutine.spin(self.memory.version)
            self._ready.append(coroutine)

    def _pick(self) -> Coroutine | None:
        version = self.memory.version
        if self._held and self._checked != version:
            self._checked = version
            for coroutine in [c for c in self._held if c.waiting.ready()]:
                coroutine.waiting = None
                self._held.remove(coroutine)
                self._ready.append(coroutine)
        able = [c for c in self._ready if not c.is_idle(version)]
        polls = not able
        if polls:
            able = self._ready
            if able and all(c.spins > _SPINS for c in able):
                raise self._deadlock()
        if not able:
            return None
        chosen = able[int(self.rng.random() * len(able))]
        if self._uneven and len(able) > 1 and self.rng.random() < 0.9:
            other = able[int(self.rng.random() * len(able))]
            chosen = max(chosen, other, key=lambda c: c.pace)
        chosen.frame.newest = polls  # what nobody changes any more is seen at last
        return chosen

    def _next_launch(self, stream: Stream) -> None:
        for epoch, kernel, env, extents in stream.launches:
            start = stream.clock
            launch = Launch(stream.rank, epoch, kernel, env, extents, start, start.copy())
            stream.launch = launch
            stream.launched = epoch + 1
            self._fill(launch)
            if launch.running:
                return
        stream.launch = None

    def _fill(self, launch: Launch) -> None:
        while launch.running < self.resident_blocks and launch.next < launch.blocks:
            self._ready.append(self._start(launch, launch.next))
            launch.next += 1
            launch.running += 1

    def _start(self, launch: Launch, number: int) -> Coroutine:
        kernel, index = launch.kernel, launch.index(number)
        order = BlockOrder.start(self.layout, launch.rank, number, launch.start)
        env = list(launch.env)
        for (slot, _), i in zip(kernel.grid, index, strict=True):
            env[slot] = i
        block = Block(self, kernel, launch.rank, launch.epoch, number, index, order, env)
        mask = Mask(np.ones(kernel.threads_in_block, np.bool_), kernel.class_of)
        frame = Frame(block, mask)
        return Coroutine(block, frame, go(kernel.body, frame), launch, self.rng.random())

    def _finish(self, coroutine: Coroutine) -> None:
        launch = coroutine.launch
        coroutine.block.order.finish(launch.end)
        launch.running -= 1
        self._fill(launch)
        if not launch.running:
            stream = self.streams[launch.rank]
            stream.clock = launch.end
            self._next_launch(stream)

    def _deadlock(self) -> SimulationError:
        lines = [f"  {c.waiting.text()}" for c in self._held if c.waiting is not None]
        lines += [
            f"  {c.block.name()} in launch {c.block.epoch} polls in a loop" for c in self._ready
        ]
        for stream in self.streams:
            launch = stream.launch
            if launch is None:
                lines.append(f"  rank {stream.rank} has finished its {stream.launched} launches")
            elif launch.next < launch.blocks:
                lines.append(
                    f"  rank {stream.rank}, blocks {launch.next} to {launch.blocks - 1} have not "
                    f"started: {self.resident_blocks} fit at a time and none of those ends"
                )
        return SimulationError("deadlock", "nobody can go on\n" + "\n".join(lines))
