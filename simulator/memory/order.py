"""Who did what before whom: agents, their vector clocks, and the events they leave.

An agent is what can act by itself: in each block every class of threads, every set of classes that
acts together, each such set copying (put and get share out elements among threads as no other
operation does), its bulk stores by the class that issues them, and its loads to shared memory by
the mbarrier they complete on; and each stream. Components of a clock are counted in releases of
that agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...runtime.plans.steps import name_of_stream
from .clock import Clock, View
from .threads import ThreadOrder

CTA, GPU, SYS = 1, 2, 3
SETS = 8
"""Agents of a block for sets of classes: the first two are all classes, and all that copy. Further
sets act as all do."""
LEVEL = {"cta": CTA, "gpu": GPU, "sys": SYS}

Sync = dict[tuple, Clock]
"""What acquiring a value makes visible: clock by (rank, block or None, scope) of the releasers."""


class Layout:
    """Numbers the agents of all blocks of all ranks; 0 is the host.

    The blocks of a rank are those of all its streams, one stream after another, so that kernels
    side by side have different ones. A stream itself acts as one block more, its first.

    Args:
        streams: (name, most blocks of one kernel) of each.
        classes: of threads of a block.
        mbarriers: of a block.
    """

    def __init__(
        self, world_size: int, streams: Sequence[tuple[str | None, int]], thread_groups: int,
        mbarriers: int = 0,
    ) -> None:  # fmt: skip
        self.thread_groups = thread_groups
        self.copies = thread_groups + 1 + mbarriers
        """Agents of a block that copy asynchronously: the bulk stores of each class, T.async_copy,
        and the loads of each mbarrier."""
        self.stride = thread_groups + SETS + self.copies
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
    clock: list[Clock]
    """By class of threads: what is before its next access, but for its own."""
    time: list[int]
    """By class: of its next access."""
    set_time: list[int]
    """By set of classes: of its next access."""
    copy_time: list[int]
    """By agent that copies asynchronously: of its last access."""
    base: int
    observed: Clock
    """What led to the values that the block has read, whether or not memory orders it."""
    fences: list[Sync] = field(default_factory=list)
    """By class: what a relaxed store after a release fence publishes."""
    seen: list[Sync] = field(default_factory=list)
    """By class: what an acquire fence would make visible."""
    threads: ThreadOrder = field(kw_only=True)

    @staticmethod
    def start(
        layout: Layout, rank: int, block: int, launch: Clock, threads: ThreadOrder | None = None
    ) -> BlockOrder:
        """The block's clocks at its start: all that is before the launch is before it. It has one
        thread of each class unless ``threads`` is given."""
        base, n = layout.base(rank, block), layout.thread_groups
        return BlockOrder(
            layout, rank, block, [launch] * n, [launch.time(base + i) + 1 for i in range(n)],
            [launch.time(base + n + i) + 1 for i in range(SETS)],
            [launch.time(base + n + SETS + i) for i in range(layout.copies)], base,
            launch, [{} for _ in range(n)], [{} for _ in range(n)],
            threads=threads or ThreadOrder(np.arange(n)[:, None]),
        )  # fmt: skip

    def __post_init__(self) -> None:
        every = self.threads.thread_groups
        self._sets = {(every, False): 0, (every, True): 1}
        """Each set of classes that acted together, and whether it copied, by number."""
        self._is_mixed = False
        """Whether other sets acted as all classes do."""

    @property
    def _copying(self) -> int:
        """The first agent that copies asynchronously."""
        return self.base + self.layout.thread_groups + SETS

    def _set(self, thread_groups: tuple[int, ...], copies: bool) -> int:
        """The number of a set of classes."""
        number = self._sets.get((thread_groups, copies))
        if number is None:
            if len(self._sets) == SETS:
                self._is_mixed = True
                return int(copies)
            number = self._sets[thread_groups, copies] = len(self._sets)
        return number

    def bulk(self, thread_groups: tuple[int, ...]) -> int:
        """Agent of the bulk stores that these classes issue. One thread issues them; where several
        could, a program must not count on the first."""
        return self._copying + thread_groups[-1]

    def loads(self, mbarrier: int) -> int:
        """Agent of the loads that complete on an mbarrier, counted from 1; 0 is T.async_copy."""
        return self._copying + self.layout.thread_groups + mbarrier

    def actor(self, thread_groups: tuple[int, ...], copies: bool = False) -> tuple[int, int, View]:
        """Agent, its time, and what is before an access by these classes."""
        parts = [(self.clock[i], self.base + i) for i in thread_groups]
        if len(thread_groups) == 1:
            (i,) = thread_groups
            return self.base + i, self.time[i], View(parts, (self.base + i,))
        number = self._set(thread_groups, copies)
        agent = self.base + self.layout.thread_groups + number
        return agent, self.set_time[number], View(parts, (agent,))

    def bulk_actor(self, thread_groups: tuple[int, ...]) -> tuple[int, int, View]:
        """The same for a bulk store these classes issue: it is after what they did, and after those
        stores of its thread that the thread knows to be complete."""
        agent, bulk = self.actor(thread_groups)[0], self.bulk(thread_groups)
        complete = self.clock[thread_groups[-1]].time(bulk)
        parts = [
            (clock if clock.time(bulk) >= complete else clock.with_times({bulk: complete}), own)
            for clock, own in self.actor(thread_groups)[2].parts
        ]
        return bulk, self._next_time(bulk), View(parts, (agent,))

    def load_actor(self, thread_groups: tuple[int, ...], mbarrier: int) -> tuple[int, int, View]:
        """Agent, its time, and what is before a load to shared memory that these classes issue."""
        agent, _, view = self.actor(thread_groups)
        loads = self.loads(mbarrier)
        return loads, self._next_time(loads), View(view.parts, (agent,))

    def times(self, thread_groups: tuple[int, ...]) -> dict[int, int]:
        """Time of the next access of each of these classes, by agent."""
        return {self.base + i: self.time[i] for i in thread_groups}

    def complete_bulk(self, thread_groups: tuple[int, ...], time: int) -> None:
        """What the bulk stores of these classes wrote up to ``time`` is visible to them."""
        self._complete(thread_groups, self.bulk(thread_groups), time)

    def complete_loads(self, thread_groups: tuple[int, ...], mbarrier: int, time: int) -> None:
        """These classes know that the loads up to ``time`` have read global memory."""
        self._complete(thread_groups, self.loads(mbarrier), time)

    def _next_time(self, copying: int) -> int:
        self.copy_time[copying - self._copying] += 1
        return self.copy_time[copying - self._copying]

    def _complete(self, thread_groups: tuple[int, ...], copying: int, time: int) -> None:
        def advanced(clock: Clock) -> Clock:
            return clock if clock.time(copying) >= time else clock.with_times({copying: time})

        if time:
            self._advance(thread_groups, advanced)

    def barrier(self, thread_groups: tuple[int, ...]) -> None:
        """All these classes have seen what any of them has: the block barrier."""
        joined = self._joined(thread_groups)
        for i in thread_groups:
            self.clock[i] = joined
            self.time[i] += 1
        for number in self._sets_of(thread_groups):
            self.set_time[number] += 1
        self.threads.barrier(self.threads.members(thread_groups))

    def release(self, i: int, level: int) -> Sync:
        """What class ``i`` publishes with a release of this scope."""
        published = self.clock[i].with_times({self.base + i: self.time[i]})
        self.time[i] += 1
        self.threads.release((i,))
        return {(self.rank, self.block if level == CTA else None, level): published}

    def fence(self, i: int, level: int, fences_before: Sync | None = None) -> Sync:
        """Order class ``i``: later relaxed stores release, earlier relaxed loads acquire.

        Args:
            fences_before: what earlier fences publish directly to this one, if it is ``sc``.

        Returns:
            What it publishes.
        """
        self.acquire((i,), self.seen[i], level)
        self.acquire((i,), fences_before or {}, level)
        published = self.release(i, level)
        self.fences[i] = merge(self.fences[i], published)
        return published

    def acquire(self, thread_groups: tuple[int, ...], sync: Sync, level: int) -> None:
        """These classes see what was published, as far as both scopes include the other side."""
        for (rank, block, scope), clock in sync.items():
            if block is not None:
                includes = (rank, block) == (self.rank, self.block)
            elif rank == self.rank:
                includes = min(scope, level) >= GPU
            else:
                includes = min(scope, level) >= SYS
            if includes:
                self.join(thread_groups, clock)

    def join(self, thread_groups: tuple[int, ...], clock: Clock) -> None:
        """All that is before this clock is before these classes' next accesses."""
        self._advance(thread_groups, lambda own: own.joined(clock))
        self.threads.acquire(thread_groups)

    def note_seen(self, i: int, sync: Sync) -> None:
        """Class ``i`` read a value relaxed: a fence may make it an acquire."""
        if sync:
            self.seen[i] = merge(self.seen[i], sync)

    def causal_clock(self) -> Clock:
        """Return the clock of all that may have led to a change that the block makes now."""
        causes = self._joined(range(self.layout.thread_groups)).joined(self.observed)
        self.set_time = [time + 1 for time in self.set_time]  # what follows did not lead to it
        self.time = [time + 1 for time in self.time]
        return causes

    def observe(self, causes: Clock | None) -> None:
        """Note that the block read a value to which all before ``causes`` led."""
        if causes is not None:
            self.observed = self.observed.joined(causes)

    def end(self) -> Clock:
        """All the block did."""
        times = {self._copying + i: time for i, time in enumerate(self.copy_time)}
        return self._joined(range(self.layout.thread_groups)).with_times(times)

    def _joined(self, thread_groups: Iterable[int]) -> Clock:
        """All these classes have seen and done, together, too."""
        first = self.base + self.layout.thread_groups
        times = {first + number: self.set_time[number] for number in self._sets_of(thread_groups)}
        joined = self.clock[next(iter(thread_groups))]
        for i in thread_groups:
            joined = joined.joined(self.clock[i])
            times[self.base + i] = self.time[i]
        return joined.with_times(times)

    def _sets_of(self, thread_groups: Iterable[int]) -> list[int]:
        """Sets that acted, of no other classes than these."""
        among = set(thread_groups)
        return [
            number
            for (members, _), number in self._sets.items()
            if among.issuperset(members) or (self._is_mixed and number < 2)
        ]

    def _advance(self, thread_groups: tuple[int, ...], f: Callable[[Clock], Clock]) -> None:
        """Change the clocks of these classes; those who share one go on sharing."""
        done: dict[int, Clock] = {}
        before = [self.clock[i] for i in thread_groups]
        for i, clock in zip(thread_groups, before, strict=True):
            if id(clock) not in done:
                done[id(clock)] = f(clock)
            self.clock[i] = done[id(clock)]


def merge(one: Sync, other: Sync) -> Sync:
    """Both; neither is changed."""
    if not one or not other:
        return one or other
    out = dict(one)
    for key, clock in other.items():
        out[key] = out[key].joined(clock) if key in out else clock
    return out
