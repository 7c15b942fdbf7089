"""Who did what before whom: agents, their vector clocks, and the events they leave.

An agent is what can act by itself: in each block every class of threads, the block acting as a
whole, the block copying (put and get share out elements among threads as no other operation does),
and its bulk copies; and each stream. Components of a clock are counted in releases of that agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..plans import name_of_stream

CTA, GPU, SYS = 1, 2, 3
LEVEL = {"cta": CTA, "gpu": GPU, "sys": SYS}

Sync = dict[tuple, np.ndarray]
"""What acquiring a value makes visible: clock by (rank, block or None, scope) of the releasers."""


class Layout:
    """Numbers the agents of all blocks of all ranks; 0 is the host.

    The blocks of a rank are those of all its streams, one stream after another, so that kernels
    side by side have different ones. A stream itself acts as one block more, its first.

    Args:
        streams: (name, most blocks of one kernel) of each.
        classes: of threads of a block.
    """

    def __init__(
        self, world_size: int, streams: Sequence[tuple[str | None, int]], classes: int
    ) -> None:
        self.classes, self.stride = classes, classes + 3
        self.first: dict[str | None, int] = {}
        self.names: list[str] = []
        for stream, blocks in streams:
            self.first[stream] = len(self.names)
            of = "" if stream is None else f" of stream {stream!r}"
            self.names.append(name_of_stream(stream))
            self.names += [f"block {i}{of}" for i in range(blocks)]
        self.blocks = len(self.names)
        self.count = 1 + world_size * self.blocks * self.stride

    def base(self, rank: int, block: int) -> int:
        return 1 + (rank * self.blocks + block) * self.stride

    def is_stream(self, block: int) -> bool:
        return block in self.first.values()

    def place(self, agent: Any) -> tuple[Any, Any, Any]:
        """(rank, block, which agent of the block); the host is rank -1."""
        block, kind = np.divmod(np.asarray(agent) - 1, self.stride)
        rank, block = np.divmod(block, self.blocks)
        return rank, block, kind


class Events:
    """Every access to global memory, by number; event 0 is the host's, before all others."""

    def __init__(self) -> None:
        self.agent = np.zeros(1024, np.int32)
        self.time = np.zeros(1024, np.int32)
        self.scope = np.zeros(1024, np.int8)
        self.what: list[tuple] = [("host", "", None, None, -1, True)]

    def add(self, agent: int, time: int, scope: int, what: tuple) -> int:
        number = len(self.what)
        if number == len(self.agent):
            for name in ("agent", "time", "scope"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.agent[number], self.time[number], self.scope[number] = agent, time, scope
        self.what.append(what)
        return number


@dataclass
class BlockOrder:
    """The clocks of one block of one launch."""

    layout: Layout
    rank: int
    block: int
    clock: np.ndarray
    """(classes, agents)."""
    whole_time: int
    bulk_time: int
    base: int
    fences: list[Sync] = field(default_factory=list)
    """By class: what a relaxed store after a release fence publishes."""
    seen: list[Sync] = field(default_factory=list)
    """By class: what an acquire fence would make visible."""

    @staticmethod
    def start(layout: Layout, rank: int, block: int, launch: np.ndarray) -> BlockOrder:
        """The block's clocks at its start: all that is before the launch is before it."""
        base, n = layout.base(rank, block), layout.classes
        clock = np.repeat(launch[None], n, axis=0)
        for i in range(n):
            clock[i, base + i] += 1
        return BlockOrder(
            layout, rank, block, clock, int(launch[base + n]) + 1, int(launch[base + n + 2]), base,
            [{} for _ in range(n)], [{} for _ in range(n)],
        )  # fmt: skip

    @property
    def whole(self) -> int:
        return self.base + self.layout.classes

    @property
    def copying(self) -> int:
        return self.whole + 1

    @property
    def bulk(self) -> int:
        return self.whole + 2

    def actor(self, classes: tuple[int, ...], copies: bool = False) -> tuple[int, int, np.ndarray]:
        """Agent, its time, and the clock that says what is before an access by these classes."""
        if len(classes) == 1:
            i = classes[0]
            return self.base + i, int(self.clock[i, self.base + i]), self.clock[i]
        view = self.clock[list(classes)].min(axis=0)
        agent = self.copying if copies else self.whole
        view[agent] = self.whole_time
        return agent, self.whole_time, view

    def bulk_actor(self, classes: tuple[int, ...]) -> tuple[int, int, np.ndarray]:
        """The same for a bulk store these classes issue: it is after what they did."""
        _, _, view = self.actor(classes)
        self.bulk_time += 1
        view = view.copy()
        view[self.bulk] = self.bulk_time
        return self.bulk, self.bulk_time, view

    def complete_bulk(self, classes: tuple[int, ...], time: int) -> None:
        """What the block's bulk stores wrote up to ``time`` is visible to these classes."""
        rows = list(classes)
        self.clock[rows, self.bulk] = np.maximum(self.clock[rows, self.bulk], time)

    def meet(self, classes: tuple[int, ...]) -> None:
        """All these classes have seen what any of them has: the block barrier."""
        rows = list(classes)
        joined = self.clock[rows].max(axis=0)
        joined[[self.whole, self.copying]] = self.whole_time
        self.clock[rows] = joined
        for i in rows:
            self.clock[i, self.base + i] += 1
        self.whole_time += 1

    def release(self, i: int, level: int) -> Sync:
        """What class ``i`` publishes with a release of this scope."""
        published = {self._key(level): self.clock[i].copy()}
        self.clock[i, self.base + i] += 1
        return published

    def fence(self, i: int, level: int) -> None:
        """Before it against after it: later relaxed stores release, earlier relaxed loads
        acquire."""
        self.acquire(i, self.seen[i], level)
        self.fences[i] = merge(self.fences[i], self.release(i, level))

    def acquire(self, i: int, sync: Sync, level: int) -> None:
        """Class ``i`` sees what was published, as far as both scopes include the other side."""
        for (rank, block, scope), clock in sync.items():
            if block is not None:
                heard = (rank, block) == (self.rank, self.block)
            elif rank == self.rank:
                heard = min(scope, level) >= GPU
            else:
                heard = min(scope, level) >= SYS
            if heard:
                np.maximum(self.clock[i], clock, out=self.clock[i])

    def note_seen(self, i: int, sync: Sync) -> None:
        """Class ``i`` read a value relaxed: a fence may make it an acquire."""
        if sync:
            self.seen[i] = merge(self.seen[i], sync)

    def finish(self, launch_end: np.ndarray) -> None:
        """All the block did is before the end of its launch."""
        np.maximum(launch_end, self.clock.max(axis=0), out=launch_end)
        launch_end[[self.whole, self.copying]] = self.whole_time
        launch_end[self.bulk] = self.bulk_time

    def _key(self, level: int) -> tuple:
        return (self.rank, self.block if level == CTA else None, level)


def merge(one: Sync, other: Sync) -> Sync:
    """Both; neither is changed."""
    if not one or not other:
        return one or other
    out = dict(one)
    for key, clock in other.items():
        out[key] = np.maximum(out[key], clock) if key in out else clock
    return out
