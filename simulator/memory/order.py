"""Happens-before order: agents, their vector clocks, and events.

An agent acts on its own. The agents are each stream and, in each block,

- each thread group, and each set of thread groups that acts together;
- each such set while it copies, because put and get divide elements among threads in their own way;
- the bulk stores of each thread group;
- the asynchronous loads to shared memory of each mbarrier.

The component of an agent in a clock counts the releases of that agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...runtime.plans.steps import name_of_stream
from .clock import Clock, View
from .threads import ThreadOrder

CTA, GPU, SYS = 1, 2, 3
SETS = 8
"""Agents of a block for sets of thread groups. The first two are all groups, and all groups while
they copy. Sets beyond this number share these two."""
LEVEL = {"cta": CTA, "gpu": GPU, "sys": SYS}

Sync = dict[tuple, Clock]
"""Clocks that acquiring a value joins, by (rank, block or None, scope) of the release."""


class Layout:
    """Numbers of the agents of all blocks of all ranks; 0 is the host.

    The blocks of a rank are those of all its streams, one stream after another, so concurrent
    kernels have different blocks. The first block of a stream is the stream itself.

    Args:
        streams: largest number of blocks of a kernel of each stream; None is the caller's.
        thread_groups: number of thread groups of a block.
        mbarriers: number of mbarriers of a block.
    """

    def __init__(
        self, world_size: int, streams: Mapping[str | None, int], thread_groups: int,
        mbarriers: int = 0,
    ) -> None:  # fmt: skip
        self.thread_groups = thread_groups
        self.copies = thread_groups + 1 + mbarriers
        """Number of agents of a block that copy asynchronously: the bulk stores of each thread
        group, T.async_copy, and the loads of each mbarrier."""
        self.stride = thread_groups + SETS + self.copies
        self.first: dict[str | None, int] = {}
        self.names: list[str] = []
        for stream, blocks in streams.items():
            self.first[stream] = len(self.names)
            self.names += [name_of_stream(stream), *[""] * blocks]
            self.name_blocks(stream, [f"block {i}" for i in range(blocks)])
        self.blocks = len(self.names)
        self.count = 1 + world_size * self.blocks * self.stride

    def name_blocks(self, stream: str | None, names: Iterable[str]) -> None:
        """Set the names of the first blocks of a stream."""
        suffix = "" if stream is None else f" of {name_of_stream(stream)}"
        for block, name in enumerate(names, self.first[stream] + 1):
            self.names[block] = f"{name}{suffix}"

    def base(self, rank: int, block: int) -> int:
        return 1 + (rank * self.blocks + block) * self.stride

    def is_stream(self, block: int) -> bool:
        return block in self.first.values()

    def place(self, agent: Any) -> tuple[Any, Any, Any]:
        """Return rank, block and number within the block of an agent. The host is rank -1."""
        block, kind = divmod(agent - 1, self.stride)
        rank, block = divmod(block, self.blocks)
        return rank, block, kind


class Events:
    """All accesses to global memory, by number. Event 0 is the host's and precedes all others."""

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
    """Per thread group: the clock of its next access, without its own accesses."""
    time: list[int]
    """Per thread group: time of its next access."""
    set_time: list[int]
    """Per set of thread groups: time of its next access."""
    copy_time: list[int]
    """Per agent that copies asynchronously: time of its last access."""
    base: int
    observed: Clock
    """Causes of the values that the block has read, also those that memory does not order."""
    fences: list[Sync] = field(default_factory=list)
    """Per thread group: what its relaxed stores after a release fence publish."""
    seen: list[Sync] = field(default_factory=list)
    """Per thread group: what an acquire fence would join."""
    polled: Clock = field(init=False)
    """Causes of the words with flags that the block, and earlier launches of its stream, have
    polled."""
    threads: ThreadOrder = field(kw_only=True)

    @staticmethod
    def start(
        layout: Layout, rank: int, block: int, launch: Clock, threads: ThreadOrder | None = None
    ) -> BlockOrder:
        """Return the clocks of a block at its start, which follows all before the launch. Each
        thread group has one thread unless ``threads`` is given."""
        base, n = layout.base(rank, block), layout.thread_groups
        times = launch.range(base, layout.stride)
        return BlockOrder(
            layout, rank, block, [launch] * n, [time + 1 for time in times[:n]],
            [time + 1 for time in times[n : n + SETS]], times[n + SETS :], base,
            launch, [{} for _ in range(n)], [{} for _ in range(n)],
            threads=threads or ThreadOrder(np.arange(n)[:, None]),
        )  # fmt: skip

    def __post_init__(self) -> None:
        self.polled = self.observed
        all_groups = self.threads.thread_groups
        self._sets = {(all_groups, False): 0, (all_groups, True): 1}
        """Number of each set of thread groups that acted together, and whether it copied."""
        self._inside: dict[tuple[int, ...], list[int]] = {}
        """Numbers of the sets inside these thread groups."""
        self._is_mixed = False
        """True if further sets share the numbers of all thread groups."""

    @property
    def _copying(self) -> int:
        """First agent that copies asynchronously."""
        return self.base + self.layout.thread_groups + SETS

    def _set(self, thread_groups: tuple[int, ...], copies: bool) -> int:
        """Return the number of a set of thread groups."""
        number = self._sets.get((thread_groups, copies))
        if number is None:
            self._inside.clear()
            if len(self._sets) == SETS:
                self._is_mixed = True
                return int(copies)
            number = self._sets[thread_groups, copies] = len(self._sets)
        return number

    def bulk(self, thread_groups: tuple[int, ...]) -> int:
        """Return the agent of the bulk stores that these thread groups issue.

        One thread issues them. If several could, a program must not depend on which one it is.
        """
        return self._copying + thread_groups[-1]

    def loads(self, mbarrier: int) -> int:
        """Return the agent of the loads that complete on an mbarrier, from 1; 0 is T.async_copy."""
        return self._copying + self.layout.thread_groups + mbarrier

    def actor(self, thread_groups: tuple[int, ...], copies: bool = False) -> tuple[int, int, View]:
        """Return agent, time and view of an access by these thread groups."""
        parts = [(self.clock[i], self.base + i) for i in thread_groups]
        if len(thread_groups) == 1:
            (i,) = thread_groups
            return self.base + i, self.time[i], View(parts, (self.base + i,))
        number = self._set(thread_groups, copies)
        agent = self.base + self.layout.thread_groups + number
        return agent, self.set_time[number], View(parts, (agent,))

    def bulk_actor(self, thread_groups: tuple[int, ...]) -> tuple[int, int, View]:
        """Return agent, time and view of a bulk store that these thread groups issue.

        The store happens after their accesses, and after the bulk stores of the issuing thread
        that this thread has waited for.
        """
        agent, bulk = self.actor(thread_groups)[0], self.bulk(thread_groups)
        complete = self.clock[thread_groups[-1]].time(bulk)
        parts = [
            (clock if clock.time(bulk) >= complete else clock.with_times({bulk: complete}), own)
            for clock, own in self.actor(thread_groups)[2].parts
        ]
        return bulk, self._next_time(bulk), View(parts, (agent,))

    def load_actor(self, thread_groups: tuple[int, ...], mbarrier: int) -> tuple[int, int, View]:
        """Return agent, time and view of a load to shared memory that these groups issue."""
        agent, _, view = self.actor(thread_groups)
        loads = self.loads(mbarrier)
        return loads, self._next_time(loads), View(view.parts, (agent,))

    def times(self, thread_groups: tuple[int, ...]) -> dict[int, int]:
        """Return the time of the next access of each of these thread groups, by agent."""
        return {self.base + i: self.time[i] for i in thread_groups}

    def complete_bulk(self, thread_groups: tuple[int, ...], time: int) -> None:
        """Order the bulk stores of these groups up to ``time`` before their next accesses."""
        self._complete(thread_groups, self.bulk(thread_groups), time)

    def complete_loads(self, thread_groups: tuple[int, ...], mbarrier: int, time: int) -> None:
        """Order the loads up to ``time`` before the next accesses of these thread groups."""
        self._complete(thread_groups, self.loads(mbarrier), time)

    def last_load(self, mbarrier: int) -> int:
        """Return the time of the last load that completes on an mbarrier; see ``loads``."""
        return self.copy_time[self.layout.thread_groups + mbarrier]

    def _next_time(self, copying: int) -> int:
        self.copy_time[copying - self._copying] += 1
        return self.copy_time[copying - self._copying]

    def _complete(self, thread_groups: tuple[int, ...], copying: int, time: int) -> None:
        def advanced(clock: Clock) -> Clock:
            return clock if clock.time(copying) >= time else clock.with_times({copying: time})

        if time:
            self._advance(thread_groups, advanced)

    def barrier(self, thread_groups: tuple[int, ...]) -> None:
        """Join the clocks of these thread groups, as a block barrier does."""
        joined = self._joined(thread_groups)
        for i in thread_groups:
            self.clock[i] = joined
            self.time[i] += 1
        for number in self._sets_of(thread_groups):
            self.set_time[number] += 1
        self.threads.barrier(self.threads.members(thread_groups))

    def release(self, i: int, level: int) -> Sync:
        """Return what a release of this scope by thread group ``i`` publishes."""
        published = self.clock[i].with_times({self.base + i: self.time[i]})
        self.time[i] += 1
        self.threads.release((i,))
        return {(self.rank, self.block if level == CTA else None, level): published}

    def published(
        self, thread_groups: Iterable[int], level: int, before: Clock | None
    ) -> Clock | None:
        """Release by each of these thread groups; return ``before`` and all that they publish."""
        for i in thread_groups:
            (clock,) = self.release(i, level).values()
            before = clock if before is None else before.joined(clock)
        return before

    def fence(self, i: int, level: int, fences_before: Sync | None = None) -> Sync:
        """Fence of thread group ``i``: later relaxed stores release, earlier relaxed loads acquire.

        Args:
            fences_before: what earlier ``sc`` fences publish to this one, if it is ``sc``.

        Returns:
            What the fence publishes.
        """
        self.acquire((i,), self.seen[i], level)
        self.acquire((i,), fences_before or {}, level)
        published = self.release(i, level)
        self.fences[i] = merge(self.fences[i], published)
        return published

    def acquire(self, thread_groups: tuple[int, ...], sync: Sync, level: int) -> None:
        """Join the published clocks whose scope and ``level`` both include the other side."""
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
        """Join ``clock`` into the clocks of these thread groups: what it covers happens before
        their next accesses."""
        self._advance(thread_groups, lambda clock_of_group: clock_of_group.joined(clock))
        self.threads.acquire(thread_groups)

    def note_seen(self, i: int, sync: Sync) -> None:
        """Note a relaxed read of thread group ``i``, which a later fence may make an acquire."""
        if sync:
            self.seen[i] = merge(self.seen[i], sync)

    def causal_clock(self, thread_groups: Iterable[int] | None = None) -> Clock:
        """Return the clock of all that may have led to a change that the block makes now.

        Args:
            thread_groups: the threads that may have led to it; None: all.
        """
        groups = range(self.layout.thread_groups) if thread_groups is None else thread_groups
        causes = self._joined(groups).joined(self.observed)
        self.set_time = [time + 1 for time in self.set_time]  # later accesses are not causes
        self.time = [time + 1 for time in self.time]
        return causes

    def observe(self, causes: Clock | None) -> None:
        """Note that the block read a value to which all before ``causes`` led."""
        if causes is not None:
            self.observed = self.observed.joined(causes)

    def end(self) -> Clock:
        """Return the clock of all accesses of the block."""
        times = {self._copying + i: time for i, time in enumerate(self.copy_time)}
        return self._joined(range(self.layout.thread_groups)).with_times(times)

    def _joined(self, thread_groups: Iterable[int]) -> Clock:
        """Return the join of the clocks of these thread groups, with their own accesses."""
        first = self.base + self.layout.thread_groups
        times = {first + number: self.set_time[number] for number in self._sets_of(thread_groups)}
        joined = self.clock[next(iter(thread_groups))]
        for i in thread_groups:
            if self.clock[i] is not joined:
                joined = joined.joined(self.clock[i])
            times[self.base + i] = self.time[i]
        return joined.with_times(times)

    def _sets_of(self, thread_groups: Iterable[int]) -> list[int]:
        """Return the numbers of the sets that contain only these thread groups."""
        among = tuple(thread_groups)
        numbers = self._inside.get(among)
        if numbers is None:
            numbers = self._inside[among] = [
                number
                for (members, _), number in self._sets.items()
                if set(among).issuperset(members) or (self._is_mixed and number < 2)
            ]
        return numbers

    def _advance(self, thread_groups: tuple[int, ...], f: Callable[[Clock], Clock]) -> None:
        """Apply ``f`` to the clocks of these thread groups, once for each shared clock."""
        advanced: dict[int, Clock] = {}
        before = [self.clock[i] for i in thread_groups]
        for i, clock in zip(thread_groups, before, strict=True):
            if id(clock) not in advanced:
                advanced[id(clock)] = f(clock)
            self.clock[i] = advanced[id(clock)]


def merge(a: Sync, b: Sync) -> Sync:
    """Return the union of both, with joined clocks. The arguments are not changed."""
    if not a or not b:
        return a or b
    out = dict(a)
    for key, clock in b.items():
        out[key] = out[key].joined(clock) if key in out else clock
    return out
