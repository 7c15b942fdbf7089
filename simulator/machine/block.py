"""State of one block of one launch: threads, tiles, mbarriers, asynchronous copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.clock import Clock
from ..memory.memory import Access
from ..memory.order import BlockOrder
from ..memory.threads import WARP, ElementAccess, ParallelLoop, divide
from ..memory.values import uninitialized_array
from ..report.errors import SimulationError, read_before_write

if TYPE_CHECKING:
    from .streams import Launch


_MAX_MASKS = 4096
"""Largest number of masks that blocks of a kernel share."""


class Mask:
    """Active threads of a block. All blocks of a kernel share their masks."""

    def __init__(
        self, on: np.ndarray, group_of: np.ndarray, shared: dict[bytes, Mask] | None = None
    ) -> None:
        self.on, self.group_of = on, group_of
        self.count = int(np.count_nonzero(on))
        self.conditions: dict[tuple, Any] = {}
        """Values of conditions that depend on the thread only."""
        self._shared = {} if shared is None else shared
        self._rows: dict[int, np.ndarray | None] = {}

    @cached_property
    def threads(self) -> np.ndarray:
        return np.flatnonzero(self.on)

    @cached_property
    def single(self) -> int | None:
        return int(self.threads[0]) if self.count == 1 else None

    @cached_property
    def overlapping(self) -> tuple[int, ...]:
        """Thread groups that contain some of these threads, and perhaps others."""
        return tuple(np.flatnonzero(np.bincount(self.group_of[self.threads])).tolist())

    @cached_property
    def thread_groups(self) -> tuple[int, ...]:
        """Thread groups whose union is these threads.

        Raises:
            Divided: there are no such groups.
        """
        sizes = np.bincount(self.group_of)
        if not self.full and sum(sizes[i] for i in self.overlapping) > self.count:
            divide(self.group_of, self.on.astype(int))
        return self.overlapping

    @cached_property
    def each(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Group and number of each thread, in a group of its own.

        Raises:
            Divided: a thread shares its group.
        """
        own = self.group_of[self.threads]
        if (np.bincount(self.group_of)[own] > 1).any():
            divide(self.group_of, np.where(self.on, np.arange(1, 1 + len(self.on)), 0))
        return [((int(self.group_of[t]),), (int(t),)) for t in self.threads]

    @cached_property
    def by_group(self) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Each thread group on its own, with its threads as a mask."""
        return [((g,), self.on & (self.group_of == g)) for g in self.overlapping]

    def rows(self, size: int) -> np.ndarray | None:
        """Return the active threads as rows of ``size`` threads each, which begin at a multiple of
        it; None if that is not possible."""
        if size not in self._rows:
            begins = self.threads[::size]
            rows = begins[:, None] + np.arange(size)
            is_whole = rows.size == self.count and (rows.reshape(-1) == self.threads).all()
            self._rows[size] = rows if is_whole and not (begins % size).any() else None
        return self._rows[size]

    @cached_property
    def groups_by_warp(self) -> list[tuple[int, ...]]:
        """Thread groups of the active threads of each warp that has any, in their order."""
        return [tuple(dict.fromkeys(self.group_of[w.threads].tolist())) for w in self.warps]

    @property
    def warps(self) -> list[Mask]:
        """The active threads of each warp that has any."""
        numbers = np.arange(len(self.on)) // WARP
        return [self.where(numbers == n) for n in np.unique(numbers[self.on])]

    @property
    def full(self) -> bool:
        return self.count == len(self.on)

    def loop(self, extents: tuple[int, ...]) -> ParallelLoop | None:
        """Return the T.Parallel that TileLang divides among these threads, or None if it cannot."""
        first, last = int(self.threads[0]), int(self.threads[-1])
        if last - first + 1 != self.count:
            return None
        return ParallelLoop(extents, first, self.count)

    def where(self, condition: np.ndarray) -> Mask:
        on, shared = self.on & condition, self._shared
        key = on.tobytes()
        if key not in shared:
            if len(shared) >= _MAX_MASKS:
                shared.clear()
            shared[key] = Mask(on, self.group_of, shared)
        return shared[key]


@dataclass(eq=False)
class AsyncCopy:
    """An asynchronous copy to elements of a tile, for reports.

    Attributes:
        wait: the operation after which it has ended.
    """

    key: Any
    op: str
    loc: str
    wait: str


class Tile:
    """Shared memory or registers: an array and its poison mask (None: no poison)."""

    def __init__(self, name: str, shape: tuple, dtype: np.dtype, scope: str) -> None:
        self.name, self.shape, self.dtype, self.scope = name, shape, dtype, scope
        self.data = uninitialized_array(shape, dtype)
        self.poison: np.ndarray | None = np.ones(shape, np.bool_)
        self.by_thread = False
        """True if each thread has its own value of these registers, along the first axis."""
        self.parted = False
        """True if poison includes values that differ between threads or points of a T.Parallel."""
        self.is_shared = scope.startswith("shared")
        self.read = self.written = -1
        """Number of barriers before the last read and the last write of shared memory."""
        self.loaded = 0
        """Time of the last T.copy to the tile in T.Pipelined, for which its first use waits, or the
        branch or loop around that use."""
        self.unwritten = ""
        """Explanation of the poison that was stored last, as in ``Memory``."""
        self.copies: list[AsyncCopy] = []
        """Asynchronous copies to the tile in flight."""

    def explain(self, key: Any, loc: str) -> str:
        """Return the explanation of poison that a line reads."""
        for copy in self.copies:
            if _overlap(self.data.shape, copy.key, key):
                return (
                    f"{copy.op} --> {copy.loc} may still be writing {self.name}, which is read "
                    f"--> {loc}; expected {copy.wait} between the two"
                )
        return self.unwritten or read_before_write(self.name, loc)

    def begin_copy(self, copy: AsyncCopy) -> None:
        """Note an asynchronous copy to elements, which are poison until it ends."""
        self.set_poison(copy.key, True, self.unwritten)
        self.copies.append(copy)

    def set_poison(self, key: Any, poison: Any, unwritten: str = "") -> None:
        """Note a write at ``key``; ``poison`` is the mask of poison values, or None.

        Args:
            unwritten: explanation of the poison.
        """
        if poison is None:
            if self.poison is not None:
                self.poison[key] = False
                if not self.poison.any():
                    self.poison, self.parted = None, False
            return
        if self.poison is None:
            self.poison = np.zeros(self.data.shape, np.bool_)
        self.poison[key], self.unwritten = poison, unwritten

    def spread(self, threads: int) -> None:
        """Give each thread its own copy."""
        if not self.by_thread:
            self.by_thread = True
            self.data = np.repeat(self.data[None], threads, axis=0)
            if self.poison is not None:
                self.poison = np.repeat(self.poison[None], threads, axis=0)

    def agreed(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Return values and poison of registers of these threads. Values that differ are poison."""
        rows = self.data[threads]
        bits = rows.view(f"u{self.dtype.itemsize}")
        differs = np.any(bits != bits[0], axis=0)
        poison = None if self.poison is None else np.any(self.poison[threads], axis=0)
        if not differs.any():
            return rows[0], poison
        self.parted = True
        return rows[0], differs if poison is None else np.logical_or(poison, differs)

    def for_points(self, space: tuple[int, ...], threads: np.ndarray) -> Tile:
        """Return a copy of the registers of ``threads`` for each point of a T.Parallel."""
        data, poison = self.agreed(threads) if self.by_thread else (self.data, self.poison)
        copies, points = Tile(self.name, self.shape, self.dtype, self.scope), int(np.prod(space))
        copies.by_thread, copies.parted, copies.unwritten = True, self.parted, self.unwritten
        copies.data = np.repeat(data[None], points, axis=0)
        copies.poison = None if poison is None else np.repeat(poison[None], points, axis=0)
        return copies

    def leave_points(self, points: Tile, mask: Mask) -> None:
        """Store the values that the threads of ``mask`` hold after the T.Parallel."""
        data, poison = points.agreed(np.arange(len(points.data)))
        if self.by_thread or not mask.full:
            self.spread(len(mask.on))
        key = mask.threads if self.by_thread else ...
        self.data[key] = data
        self.set_poison(key, poison, points.unwritten)
        self.parted = self.parted or points.parted


@dataclass
class MBarrier:
    """One mbarrier in shared memory."""

    number: int
    """Number in the block, from 1."""
    name: str
    """Buffer and index, such as ``bars[1]``."""
    count: int | None = None
    """Arrivals of a phase; None before its initialization."""
    arrived: int = 0
    bytes: int = 0
    """Bytes that are expected in the current phase and have not arrived."""
    phase: int = 0
    """Number of completed phases."""
    clock: Clock | None = None
    """Clock of the arrivals so far."""
    deliveries: list = field(default_factory=list)
    """Loads in flight in the current phase: callables that store the data."""
    landed: list = field(default_factory=list)
    """Loads of completed phases, which a wait stores."""
    issued: int = 0
    """Time of the last load."""
    loaded: int = 0
    """Time of the last load of completed phases."""
    copies: int = 0
    """Time of the last T.async_copy before an arrival."""
    copied: int = 0
    """Time of the last T.async_copy before the arrivals of completed phases."""

    def issue(self, time: int, deliver: Callable[[], Any]) -> None:
        """Note a load in flight that completes in the current phase."""
        self.deliveries.append(deliver)
        self.issued = time

    def arrive(self, frame: Frame, loc: str) -> None:
        """Count the arrival of each active thread."""
        self.arrived += frame.mask.count
        if self.count is not None and self.arrived > self.count:
            raise SimulationError(
                "arrival",
                f"{self.arrived} arrivals at mbarrier {self.name}, initialized for {self.count}, "
                f"in {frame.block.place}\n --> {loc}",
            )
        self.settle()

    def state(self, parity: int) -> str:
        """Return what a wait for a parity reports."""
        missing = f", {self.bytes} bytes missing" if self.bytes else ""
        return (
            f"mbarrier {self.name}: phase {self.phase}, parity waited for {parity}, "
            f"{self.arrived} of {self.count} arrived{missing}"
        )

    def settle(self) -> None:
        """Complete the phase, and the loads issued in it, if all have arrived."""
        if self.arrived != self.count or self.bytes:
            return
        self.landed += self.deliveries
        self.deliveries.clear()
        self.loaded, self.copied = self.issued, self.copies
        self.phase, self.arrived = self.phase + 1, 0

    def land(self) -> None:
        """Store the data of completed phases, because a thread waited for them."""
        for deliver in self.landed:
            deliver()
        self.landed.clear()


@dataclass
class NamedBarrier:
    """Block barrier of one number: the threads that have arrived since its last completion.

    Attributes:
        completed: number of completions.
    """

    arrived: list[Mask] = field(default_factory=list)
    count: int = 0
    completed: int = 0


@dataclass
class BulkStore:
    """A bulk store in flight, with the number of its group, or None before the commit."""

    thread_groups: tuple[int, ...]
    time: int
    source: tuple[Tile, Any] | None
    loc: str
    group: int | None = None


def coordinates(index: tuple[int, ...]) -> str:
    """Format the index of a block in a grid of several axes, such as `` (bx=3, by=2)``."""
    if len(index) < 2:
        return ""
    axes = zip(("bx", "by", "bz"), index, strict=False)
    return f" ({', '.join(f'{axis}={i}' for axis, i in axes)})"


class Block:
    """State of one block, on which its coroutine works."""

    def __init__(
        self, machine: Any, launch: Launch, number: int, order: BlockOrder, env: list
    ) -> None:
        self.machine, self.launch = machine, launch
        self.kernel, self.tensors = launch.kernel, launch.tensors
        self.epoch, self.rank = launch.epoch, launch.stream.rank
        self.number, self.index, self.order = number, launch.index(number), order
        self.env, self.poisoned, self.by_thread = env, [None] * len(env), [False] * len(env)
        self.explanations: dict[int, str] = {}
        """Explanation of the poison of a variable, as in ``Memory``, by slot."""
        self.tiles: dict[int, Tile] = {}
        self.barriers: dict[int, list[Any]] = {}
        """Mbarriers by the slot of their buffer."""
        self.stores: list[BulkStore] = []
        self.named: dict[int, NamedBarrier] = defaultdict(NamedBarrier)
        self.loads: list[tuple[int, Callable[[], Any]]] = []
        """T.async_copy in flight: time, and a callable that stores the data."""
        self.loaded = 0
        """Time of the last T.async_copy that has completed."""
        self.groups = 0
        self.printing: dict[int, list[Any]] = {}
        """Elements so far of the rows that T.print prints, by statement."""
        self.generators: np.ndarray | None = None
        """Seed, sequence and next number of T.rng_rand of each thread."""
        self.operands: dict[int | None, list[tuple[str, Any]]] = {}
        """What the values of variables were computed from, by slot, if numbers are checked."""

    def name(self) -> str:
        at = coordinates(self.index) or (f" ({self.index[0]})" if self.index else "")
        beside = "" if self.launch.stream.name is None else f" of {self.launch.stream}"
        return f"rank {self.rank}, block {self.number}{at}{beside}"

    @property
    def place(self) -> str:
        """Name of the block, and its launch."""
        return f"{self.name()} in launch {self.epoch}"

    def name_of(self, barrier: MBarrier) -> tuple:
        """Return a name of an mbarrier that is the same in all schedules."""
        return (
            self.rank,
            self.launch.enqueue_index,
            self.launch.title,
            self.number,
            barrier.number,
        )

    def access(
        self, thread_groups: tuple[int, ...], op: str, loc: str, scope: int = 0,
        copies: bool = False, accessed: Callable[[], ElementAccess] | None = None,
    ) -> Access:  # fmt: skip
        agent, time, view = self.order.actor(thread_groups, copies)
        threads = self.order.threads
        return Access(
            agent, time, view, scope, op, loc, self.epoch, threads, accessed, threads.time
        )

    def loaders(self, thread_groups: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the thread groups of each access of an atomic load by ``thread_groups``."""
        return [thread_groups]

    def causes(self, thread_groups: tuple[int, ...]) -> Clock:
        """Return the clock of all that may have led to a change by these thread groups: any earlier
        access of the block, because data flow between its threads is not tracked."""
        return self.order.causal_clock()

    def bulk_access(
        self, thread_groups: tuple[int, ...], op: str, loc: str, scope: int, source: Any
    ) -> Access:
        """Start a bulk store that one of these threads issues; return its access."""
        issuer = thread_groups[-1:]
        agent, time, view = self.order.bulk_actor(thread_groups)
        self.stores.append(BulkStore(issuer, time, source, loc))
        return Access(agent, time, view, scope, op, loc, self.epoch)

    def load_access(
        self, thread_groups: tuple[int, ...], op: str, loc: str, barrier: MBarrier | None
    ) -> Access:
        """Return the access of an asynchronous load to shared memory that these threads issue.

        It reads until they have waited for the mbarrier or, if that is None, for T.async_copy.
        """
        number = 0 if barrier is None else barrier.number
        agent, time, view = self.order.load_actor(thread_groups, number)
        return Access(agent, time, view, 0, op, loc, self.epoch)

    def await_load(self, tile: Tile, thread_groups: tuple[int, ...]) -> None:
        """Order the loads of T.Pipelined to a tile before the next accesses of these threads."""
        if tile.loaded:
            self.order.complete_loads(thread_groups, 0, tile.loaded)

    def note_poison(self, tile: Tile, key: Any, loc: str) -> None:
        """Note that a line reads poison from elements of a tile."""
        self.machine.memory.unwritten = tile.explain(key, loc)

    def set_poison(self, tile: Tile, key: Any, poison: Any) -> None:
        """Note a write to elements of a tile, whose poison has the explanation of the last one that
        was read; see ``Tile.set_poison``."""
        tile.set_poison(key, poison, self.machine.memory.unwritten)

    def use(self, tile: Tile, thread_groups: tuple[int, ...]) -> None:
        """Note that these threads read a tile, after a wait for its loads."""
        self.await_load(tile, thread_groups)
        if tile.is_shared:
            threads = self.order.threads
            if tile.written == threads.barriers:
                threads.barrier_all()
            tile.read = threads.barriers

    def barrier_before(self, slots: list[int]) -> None:
        """Perform the barrier that TileLang inserts before a statement that reads new tiles."""
        threads = self.order.threads
        if any(self.tiles[slot].written == threads.barriers for slot in slots):
            threads.barrier_all()

    def overwrite(self, tile: Tile) -> None:
        """Note a write of a tile, after the barrier that TileLang inserts if one is needed."""
        if tile.is_shared:
            threads = self.order.threads
            if threads.barriers in (tile.read, tile.written):
                threads.barrier_all()
            tile.written = threads.barriers

    def note_load(self, slot: int, thread_groups: tuple[int, ...], loc: str) -> None:
        """Note a load of elements of a tile or of registers."""

    def note_store(self, slot: int, thread_groups: tuple[int, ...], loc: str) -> None:
        """Note a store to elements of a tile or to registers."""

    def barrier(self, thread_groups: tuple[int, ...]) -> None:
        """Execute a barrier of these thread groups."""
        self.order.barrier(thread_groups)

    def commit(self, mask: Mask) -> None:
        """Commit the bulk stores that these threads have issued since the last group as a group."""
        groups = mask.thread_groups
        for store in self.stores:
            if store.group is None and store.thread_groups[0] in groups:
                store.group = self.groups
        self.groups += 1

    def wait_groups(self, mask: Mask, left: int, read: bool) -> None:
        """Wait until at most ``left`` groups of these threads are in flight.

        The others are complete or, if ``read``, have read their source.
        """
        groups = mask.thread_groups
        mine = [s for s in self.stores if s.group is not None and s.thread_groups[0] in groups]
        open_groups = sorted({s.group for s in mine if s.group is not None})
        done = set(open_groups[: max(0, len(open_groups) - left)])
        for store in mine:
            if store.group in done:
                store.source = None
                if not read:
                    self.order.complete_bulk(store.thread_groups, store.time)
                    self.stores.remove(store)

    def has_bulk_stores(self, thread_groups: tuple[int, ...]) -> bool:
        """Return whether a bulk store of the block may be in flight."""
        return bool(self.stores)

    def require_end(self) -> None:
        """Refuse the end of the block while a bulk store may still read its shared memory."""
        for store in self.stores:
            if store.source is not None:
                raise SimulationError(
                    "reuse",
                    f"{self.place} ends while a bulk store may still read "
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
                    f"{self.place}; W.bulk_wait(n, read=True) frees it"
                    f"\n --> {loc}",
                )


def _overlap(shape: tuple, one: Any, other: Any) -> bool:
    marks = np.zeros(shape, np.bool_)
    marks[one] = True
    return bool(np.any(marks[other]))


class Frame:
    """Execution state of a block: active threads and, in T.Parallel, the iteration space."""

    __slots__ = (
        "active", "block", "broken", "cache", "env", "gone", "loop", "loop_points", "mask",
        "newest", "operands", "points", "polls", "ranges", "space",
    )  # fmt: skip

    def __init__(self, block: Any, mask: Any, env: list[Any]) -> None:
        self.block: Block = block
        """None while the host computes the grid of a launch."""
        self.mask: Mask = mask
        self.env = env
        self.space: tuple[int, ...] | None = None
        """Extents of the enclosing T.Parallel loops, outermost first."""
        self.active: np.ndarray | None = None
        """Mask of the active points of the space; None: all."""
        self.loop: ParallelLoop | None = None
        """Executors of the points of the space; None if they are not known."""
        self.loop_points: np.ndarray | None = None
        """Point of ``loop`` for each point of the space; None: they are the same."""
        self.ranges: dict[int, tuple[int, slice]] = {}
        """Axis of the space and values of its loop variable, by ``id`` of their array."""
        self.points: dict[Tile, Tile] = {}
        """Registers written in the T.Parallel, with a copy for each point."""
        self.broken: np.ndarray | None = None
        """Lanes that have left the innermost loop in its current iteration; None: no lane. Lanes
        are the points of the T.Parallel or, outside of it, the threads of the block."""
        self.gone: np.ndarray | None = None
        """Lanes that have left the current iteration, or the loop; None: no lane."""
        self.cache: dict[int, Any] = {}
        self.newest = False
        self.operands: list[tuple[str, Any]] | None = None
        """Names and values of what the current statement has read; None: they are not checked."""
        self.polls = False
        """True if the code runs in a loop that may poll what it loads."""

    def fork(self, mask: Mask) -> Frame:
        """Return a frame for another set of threads of the same block."""
        frame = Frame(self.block, mask, self.env)
        frame.polls = self.polls
        frame.space, frame.active, frame.loop = self.space, self.active, self.loop
        frame.ranges, frame.loop_points = self.ranges, self.loop_points
        return frame

    def lanes(self) -> np.ndarray | None:
        """Return the mask of active points of the T.Parallel, or of active threads."""
        return self.active if self.space is not None else self.mask.on

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the points of the T.Parallel, or of the threads."""
        return self.mask.on.shape if self.space is None else self.space

    @property
    def on(self) -> np.ndarray:
        """The mask of ``lanes``, also if all are active."""
        lanes = self.lanes()
        return np.ones(self.shape, np.bool_) if lanes is None else lanes

    def narrow(self, condition: Any) -> bool:
        """Deactivate the lanes for which ``condition`` is false. Return whether any are active."""
        if self.space is None:
            self.mask = self.mask.where(condition)
            return self.mask.count > 0
        chosen = np.broadcast_to(condition, self.space)
        self.active = chosen if self.active is None else self.active & chosen
        return bool(self.active.any())

    def leave_iteration(self, ends_loop: bool) -> None:
        """Note that the active lanes leave the current iteration, or the innermost loop."""
        self.note_exits(self.on, ends_loop)

    def note_exits(self, lanes: np.ndarray | None, ends_loop: bool) -> None:
        """Note that these lanes have left the current iteration, or the innermost loop."""
        if lanes is None:
            return
        self.gone = lanes if self.gone is None else self.gone | lanes
        if ends_loop:
            self.broken = lanes if self.broken is None else self.broken | lanes

    def join_exits(self, fork: Frame) -> None:
        """Note the lanes that have left the iteration or the loop in a fork of this frame."""
        self.note_exits(fork.gone, ends_loop=False)
        self.note_exits(fork.broken, ends_loop=True)

    def leave_space(self) -> None:
        """Leave a T.Parallel."""
        self.space, self.active, self.loop, self.loop_points = None, None, None, None
        for tile, points in self.points.items():
            tile.leave_points(points, self.mask)
        self.points = {}

    def tile(self, slot: int) -> Tile:
        return self.block.tiles[slot]
