"""The state of one block of one launch: its threads, its own memory, its copies under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.clock import Clock
from ..memory.memory import Access
from ..memory.order import BlockOrder
from ..memory.threads import Accessed, ParallelLoop, divide
from ..memory.values import unwritten
from ..report.errors import SimulationError

if TYPE_CHECKING:
    from .streams import Launch


class Mask:
    """The threads of a block that are on the way."""

    def __init__(self, on: np.ndarray, class_of: np.ndarray) -> None:
        self.on, self.class_of = on, class_of
        self.count = int(np.count_nonzero(on))

    @cached_property
    def threads(self) -> np.ndarray:
        return np.flatnonzero(self.on)

    @cached_property
    def single(self) -> int | None:
        return int(self.threads[0]) if self.count == 1 else None

    @cached_property
    def overlapping(self) -> tuple[int, ...]:
        """Classes of these threads; others may belong to them, too."""
        return tuple(np.flatnonzero(np.bincount(self.class_of[self.threads])).tolist())

    @cached_property
    def thread_groups(self) -> tuple[int, ...]:
        """Classes that are these threads, and no others.

        Raises:
            Divided: there are none.
        """
        sizes = np.bincount(self.class_of)
        if not self.full and sum(sizes[i] for i in self.overlapping) > self.count:
            divide(self.class_of, self.on.astype(int))
        return self.overlapping

    @cached_property
    def each(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Each thread: its class, in which there is no other, and its number.

        Raises:
            Divided: there is another.
        """
        own = self.class_of[self.threads]
        if (np.bincount(self.class_of)[own] > 1).any():
            divide(self.class_of, np.where(self.on, np.arange(1, 1 + len(self.on)), 0))
        return [((int(self.class_of[t]),), (int(t),)) for t in self.threads]

    @cached_property
    def by_class(self) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Each class by itself, with its threads as a mask."""
        return [((c,), self.on & (self.class_of == c)) for c in self.overlapping]

    @property
    def full(self) -> bool:
        return self.count == len(self.on)

    def loop(self, extents: tuple[int, ...]) -> ParallelLoop | None:
        """A loop that these threads share, if TileLang can divide it among them."""
        first, last = int(self.threads[0]), int(self.threads[-1])
        if last - first + 1 != self.count:
            return None
        return ParallelLoop(extents, first, self.count)

    def where(self, condition: np.ndarray) -> Mask:
        return Mask(self.on & condition, self.class_of)


class Tile:
    """Shared memory or registers: one array, with what of it is poison (None: nothing)."""

    def __init__(self, name: str, shape: tuple, dtype: np.dtype, scope: str) -> None:
        self.name, self.shape, self.dtype, self.scope = name, shape, dtype, scope
        self.data = unwritten(shape, dtype)
        self.poison: np.ndarray | None = np.ones(shape, np.bool_)
        self.by_thread = False
        """Registers whose value differs between threads: the first axis is the thread."""
        self.parted = False
        """Whether poison is also what threads, or points of a T.Parallel, do not agree about."""
        self.is_shared = scope.startswith("shared")
        self.read = self.written = -1
        """The number of barriers before the last read, and before the last write, of shared
        memory."""
        self.loaded = 0
        """Time of the last T.copy to it in T.Pipelined, which its first use waits for."""

    def set_poison(self, key: Any, poison: Any) -> None:
        """Note what was just written at ``key``: ``poison`` says which of it, or None."""
        if poison is None:
            if self.poison is not None:
                self.poison[key] = False
                if not self.poison.any():
                    self.poison, self.parted = None, False
            return
        if self.poison is None:
            self.poison = np.zeros(self.data.shape, np.bool_)
        self.poison[key] = poison

    def spread(self, threads: int) -> None:
        """Give every thread its own copy."""
        if not self.by_thread:
            self.by_thread = True
            self.data = np.repeat(self.data[None], threads, axis=0)
            if self.poison is not None:
                self.poison = np.repeat(self.poison[None], threads, axis=0)

    def agreed(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Values and poison of registers of these threads; what differs is poison."""
        rows = self.data[threads]
        bits = rows.view(f"u{self.dtype.itemsize}")
        differs = np.any(bits != bits[0], axis=0)
        poison = None if self.poison is None else np.any(self.poison[threads], axis=0)
        if not differs.any():
            return rows[0], poison
        self.parted = True
        return rows[0], differs if poison is None else np.logical_or(poison, differs)

    def for_points(self, space: tuple[int, ...], threads: np.ndarray) -> Tile:
        """Registers of ``threads`` in a T.Parallel, for each of its points, one after another."""
        data, poison = self.agreed(threads) if self.by_thread else (self.data, self.poison)
        found, points = Tile(self.name, self.shape, self.dtype, self.scope), int(np.prod(space))
        found.by_thread, found.parted = True, self.parted
        found.data = np.repeat(data[None], points, axis=0)
        found.poison = None if poison is None else np.repeat(poison[None], points, axis=0)
        return found

    def leave_points(self, points: Tile, mask: Mask) -> None:
        """What the threads of ``mask`` hold behind the T.Parallel."""
        data, poison = points.agreed(np.arange(len(points.data)))
        if self.by_thread or not mask.full:
            self.spread(len(mask.on))
        key = mask.threads if self.by_thread else ...
        self.data[key] = data
        self.set_poison(key, poison)
        self.parted = self.parted or points.parted


@dataclass
class MBarrier:
    """One mbarrier in shared memory."""

    count: int
    number: int
    """Among those of the block, from 1."""
    arrived: int = 0
    phase: int = 0
    clock: Clock | None = None
    deliveries: list = field(default_factory=list)
    """Loads under way: callables that put the data there."""
    landed: list = field(default_factory=list)
    """Those of the phases that ended: who has not waited cannot count on them."""
    issued: int = 0
    """Time of the last load."""
    loaded: int = 0
    """Time of the last load of the phases that ended."""

    def issue(self, time: int, deliver: Callable[[], Any]) -> None:
        """A load is under way that completes in the current phase."""
        self.deliveries.append(deliver)
        self.issued = time

    def arrive(self, n: int, loc: str) -> None:
        self.arrived += n
        if self.arrived > self.count:
            raise SimulationError(
                "arrival",
                f"{self.arrived} arrivals at an mbarrier made for {self.count}\n --> {loc}",
            )
        self.settle()

    def settle(self) -> None:
        """The phase ends when all have arrived; the loads announced in it then land."""
        if self.arrived < self.count:
            return
        self.landed += self.deliveries
        self.deliveries.clear()
        self.loaded = self.issued
        self.phase, self.arrived = self.phase + 1, 0

    def land(self) -> None:
        """Somebody waited for the phase: what it loaded is there."""
        for deliver in self.landed:
            deliver()
        self.landed.clear()


@dataclass
class BulkStore:
    """A bulk store under way, in a group by number, or in none yet."""

    thread_groups: tuple[int, ...]
    time: int
    source: tuple[Tile, Any] | None
    loc: str
    group: int | None = None


class Block:
    """One block: what its coroutine works on."""

    def __init__(
        self, machine: Any, launch: Launch, number: int, order: BlockOrder, env: list
    ) -> None:
        self.machine, self.launch = machine, launch
        self.kernel, self.tensors = launch.kernel, launch.tensors
        self.rank, self.epoch = launch.stream.rank, launch.epoch
        self.number, self.index, self.order = number, launch.index(number), order
        self.env, self.poisoned, self.by_thread = env, [None] * len(env), [False] * len(env)
        self.tiles: dict[int, Tile] = {}
        self.barriers: dict[int, list[MBarrier]] = {}
        self.stores: list[BulkStore] = []
        self.loads: list[tuple[int, Callable[[], Any]]] = []
        """Of T.async_copy, under way: the time, and what puts the data there."""
        self.loaded = 0
        """Time of the last T.async_copy that has arrived."""
        self.groups = 0

    def name(self) -> str:
        at = ", ".join(map(str, self.index))
        beside = "" if self.launch.stream.name is None else f" of {self.launch.stream}"
        return f"rank {self.rank}, block {self.number}" + (f" ({at})" if at else "") + beside

    def access(
        self, thread_groups: tuple[int, ...], op: str, loc: str, scope: int = 0,
        copies: bool = False, accessed: Callable[[], Accessed] | None = None,
    ) -> Access:  # fmt: skip
        agent, time, view = self.order.actor(thread_groups, copies)
        threads = self.order.threads
        return Access(agent, time, view, scope, op, loc, self.epoch, threads, accessed)

    def bulk_access(
        self, thread_groups: tuple[int, ...], op: str, loc: str, scope: int, source: Any
    ) -> Access:
        """The access of a bulk store these threads issue, which is under way from now on.

        One of them issues it.
        """
        issuer = thread_groups[-1:]
        agent, time, view = self.order.bulk_actor(thread_groups)
        self.stores.append(BulkStore(issuer, time, source, loc))
        return Access(agent, time, view, scope, op, loc, self.epoch)

    def load_access(
        self, thread_groups: tuple[int, ...], op: str, loc: str, barrier: MBarrier | None
    ) -> Access:
        """The access of a load to shared memory that these threads issue: it reads until they have
        waited for the mbarrier, or, if None, for T.async_copy."""
        number = 0 if barrier is None else barrier.number
        agent, time, view = self.order.load_actor(thread_groups, number)
        return Access(agent, time, view, 0, op, loc, self.epoch)

    def use(self, tile: Tile, thread_groups: tuple[int, ...]) -> None:
        """These threads read a tile: they have waited for what loads it."""
        self.order.complete_loads(thread_groups, 0, tile.loaded)
        if tile.is_shared:
            threads = self.order.threads
            if tile.written == threads.barriers:
                threads.barrier_all()
            tile.read = threads.barriers

    def barrier_before(self, slots: list[int]) -> None:
        """A statement reads these tiles: TileLang puts a barrier before it if they are new."""
        threads = self.order.threads
        if any(self.tiles[slot].written == threads.barriers for slot in slots):
            threads.barrier_all()

    def overwrite(self, tile: Tile) -> None:
        """Threads write a tile; TileLang puts a barrier where shared memory needs one."""
        if tile.is_shared:
            threads = self.order.threads
            if threads.barriers in (tile.read, tile.written):
                threads.barrier_all()
            tile.written = threads.barriers

    def commit(self, thread_groups: tuple[int, ...]) -> None:
        """What these threads issued since the last group is one group."""
        for store in self.stores:
            if store.group is None and store.thread_groups[0] in thread_groups:
                store.group = self.groups
        self.groups += 1

    def wait_groups(self, thread_groups: tuple[int, ...], left: int, read: bool) -> None:
        """At most ``left`` groups of these threads are under way; the others are complete, or, if
        ``read``, have read their source."""
        mine = [
            s for s in self.stores if s.group is not None and s.thread_groups[0] in thread_groups
        ]
        open_groups = sorted({s.group for s in mine if s.group is not None})
        done = set(open_groups[: max(0, len(open_groups) - left)])
        for store in mine:
            if store.group in done:
                store.source = None
                if not read:
                    self.order.complete_bulk(store.thread_groups, store.time)
                    self.stores.remove(store)

    def complete_stores(self, thread_groups: tuple[int, ...]) -> None:
        """The placeholder of ``order_releases``: commit all, wait for all."""
        self.commit(thread_groups)
        self.wait_groups(thread_groups, 0, read=False)

    def require_end(self) -> None:
        """Refuse to end while a bulk store may still read the block's shared memory."""
        for store in self.stores:
            if store.source is not None:
                raise SimulationError(
                    "reuse",
                    f"{self.name()} in launch {self.epoch} ends while a bulk store may still read "
                    f"{store.source[0].name}; W.bulk_wait(0, read=True) lets it finish"
                    f"\n --> {store.loc}",
                )

    def require_unread(self, tile: Tile, key: Any, loc: str) -> None:
        """Refuse to overwrite shared memory that a bulk store may still read."""
        for store in self.stores:
            if store.source is not None and store.source[0] is tile and _overlap(
                tile.data.shape, store.source[1], key
            ):  # fmt: skip
                raise SimulationError(
                    "reuse",
                    f"{tile.name} is overwritten while a bulk store may still read it, by "
                    f"{self.name()} in launch {self.epoch}; W.bulk_wait(n, read=True) frees it"
                    f"\n --> {loc}",
                )


def _overlap(shape: tuple, one: Any, other: Any) -> bool:
    marks = np.zeros(shape, np.bool_)
    marks[one] = True
    return bool(np.any(marks[other]))


class Frame:
    """Where execution of a block stands: its threads on the way and, in T.Parallel, its space."""

    __slots__ = (
        "active", "block", "broken", "cache", "env", "loop", "mask", "newest", "points", "polls",
        "space",
    )  # fmt: skip

    def __init__(self, block: Block, mask: Mask) -> None:
        self.block, self.mask, self.env = block, mask, block.env
        self.space: tuple[int, ...] | None = None
        """Extents of the T.Parallel loops around, outermost first."""
        self.active: np.ndarray | None = None
        """Elements of the space on the way; None is all."""
        self.loop: ParallelLoop | None = None
        """Which threads the points of the space may have; None if that is not known."""
        self.points: dict[Tile, Tile] = {}
        """Registers written in the T.Parallel, of which each point has its own: by point."""
        self.broken: Mask | None = None
        self.cache: dict[int, Any] = {}
        self.newest = False
        self.polls = False
        """Whether a loop repeats what is loaded here until it is as wanted."""

    def fork(self, mask: Mask) -> Frame:
        """A frame for another set of threads of the same block."""
        frame = Frame(self.block, mask)
        frame.polls = self.polls
        frame.space, frame.active, frame.loop = self.space, self.active, self.loop
        return frame

    def lanes(self) -> np.ndarray | None:
        """Which elements of a vector are on the way: of the T.Parallel space, else threads."""
        return self.active if self.space is not None else self.mask.on

    def leave_space(self) -> None:
        """Behind a T.Parallel."""
        self.space, self.active, self.loop = None, None, None
        for tile, points in self.points.items():
            tile.leave_points(points, self.mask)
        self.points = {}

    def tile(self, slot: int) -> Tile:
        return self.block.tiles[slot]
