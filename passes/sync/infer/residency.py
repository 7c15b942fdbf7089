"""Check that resident blocks never wait for blocks that cannot start."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.walk import arrows, format_expr
from ..regions.accesses import Access
from ..regions.footprints import Footprints, combinations
from ..regions.granules import Counter, elements_of
from ..regions.schedule import Timestamps
from .context import SyncContext
from .copy_deps import queues_of
from .signals import signal_depth
from .waits import wait_depth


def verify_residency(context: SyncContext) -> None:
    """Refuse a program that may deadlock because waiting blocks leave no room for the blocks that
    they wait for.

    Blocks of a launch start in order. A wait is safe with any number of resident blocks if all
    signals that it waits for come from earlier blocks of any rank, or from earlier statements of
    the same block. If some wait is not, blocks that wait for later ones form batches with them. It
    suffices that all blocks of a batch can be resident, and that each wait comes after the waits
    that precede its signals in their blocks, by batch and by position in the program and its
    iterations. If even this does not hold, the launch is simulated with
    ``tileweave.resident_blocks`` blocks at a time on each rank, and refused if it deadlocks.

    Raises:
        LanguageError: names the wait's access and a block that it waits for.
    """
    kinds = ("read", "write", "add")
    footprints = [f for t in context.tensor_accesses for f in t.in_kernel(*kinds)]
    timestamps = Timestamps([f.access for f in footprints], context.program, context.world_size)
    counters = [c for c in context.counters if not c.at_exit]
    if any(c.by_copies for c in counters):
        _verify_room(context, counters)
    blocks = _num_blocks(context)
    waits = list(_waits(context, timestamps, counters, _Order(timestamps.span, np.arange(blocks))))
    if _is_ordered(waits):
        return
    batches, resident = _batches(waits, blocks, timestamps.span), context.options.resident_blocks
    if np.bincount(batches).max() <= resident:
        order = _Order(timestamps.span, batches, _times_of_waits(context, timestamps, counters))
        if _is_ordered(_waits(context, timestamps, counters, order)):
            return
    _Launch(context, timestamps).run(resident)


@dataclass(frozen=True)
class _Order:
    """Order of the waits and signals of a launch.

    Attributes:
        span: number of timestamps of a block.
        batches: the number that replaces that of each block in timestamps, in ascending order.
        waits: sorted timestamps of all waits, rank by rank, of which a signal has that of the last
            one before it in its block; None: signals have their own timestamps.
    """

    span: int
    batches: np.ndarray
    waits: np.ndarray | None = None

    def of_waits(self, time: np.ndarray) -> np.ndarray:
        """Return the timestamps of waits in this order."""
        return self.batches[time // self.span] * self.span + time % self.span

    def of_signals(self, rank: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return the timestamps of signals in this order."""
        if self.waits is None:
            return self.of_waits(time)
        blocks = len(self.batches)
        key = rank.reshape(rank.shape + (1,) * (time.ndim - rank.ndim)) * blocks * self.span + time
        last = self.waits[np.searchsorted(self.waits, key) - 1]
        first = self.batches[time // self.span] * self.span - 1
        return np.where(last // self.span == key // self.span, first + 1 + last % self.span, first)


def _times_of_waits(
    context: SyncContext, timestamps: Timestamps, counters: Sequence[Counter]
) -> np.ndarray:
    """Return ``_Order.waits``."""
    times, blocks = [], _num_blocks(context)
    for counter in counters:
        for footprints in counter.users:
            depth = wait_depth(context, counter, footprints)
            time = timestamps.of_access(footprints, depth)
            mask = footprints.mask.any(axis=_fixed_axes(time + 0 * footprints.rank), keepdims=True)
            rank, time = footprints.active(footprints.rank, time, mask=mask)
            times.append(rank * blocks * timestamps.span + time)
    return np.unique(np.concatenate(times))


def _num_blocks(context: SyncContext) -> int:
    """Return the number of blocks that access a tensor, and of those before them."""
    footprints = (f for t in context.tensor_accesses for f in t.in_kernel("read", "write", "add"))
    return 1 + max((int(f.block.max()) for f in footprints), default=0)


_Wait = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of an access that waits, in each iteration: the block, the latest timestamp of a signal that it
waits for, and the timestamp of the wait. The arrays broadcast."""


def _waits(
    context: SyncContext, timestamps: Timestamps, counters: Sequence[Counter], order: _Order
) -> Iterator[_Wait]:
    """Yield the waits of each access."""
    last = _last_signals(context, timestamps, counters, order)
    for counter in counters:
        for footprints in counter.users:
            signalled = last[counter][footprints.owner, counter.granules.numbers_of(footprints)]
            # Along an axis on which only one side varies, its minimum or maximum decides. The time
            # of the wait does not vary along the places of a data-dependent read, which are many.
            signalled = signalled.max(axis=_places_without_mask(footprints), keepdims=True)
            signalled = np.where(footprints.mask, signalled, -1)
            first = footprints.block.min(axis=_fixed_axes(signalled), keepdims=True)
            depth = wait_depth(context, counter, footprints)
            time = order.of_waits(timestamps.of_access(footprints, depth, block=first))
            yield first, signalled.max(axis=_fixed_axes(time), keepdims=True), time


def _last_signals(
    context: SyncContext, timestamps: Timestamps, counters: Sequence[Counter], order: _Order
) -> dict[Counter, np.ndarray]:
    """Return the latest timestamp of a signal to each granule, by owner and granule.

    A copy of a plan has the timestamp of the latest signal that it waits for.
    """
    last: dict[Counter, np.ndarray] = {}
    for counter in counters:
        last[counter] = np.full(counter.arrivals.shape, -1, np.int64)
        for footprints in counter.accesses.in_kernel(counter.kind):
            time = _signal_times(context, timestamps, counter, footprints)
            time = order.of_signals(footprints.rank, time)
            _, _, owner, granule, time = _latest(counter, footprints, time, from_axis=0)
            np.maximum.at(last[counter], (owner, granule), time)
    for queue in queues_of(counters):
        ready_at = -1
        for copy in queue:
            ready_at = max([ready_at, *(last[c][tuple(granule)] for c, *granule in copy.needs)])
            for c, *granule in copy.produces:
                last[c][tuple(granule)] = max(last[c][tuple(granule)], ready_at)
    return last


def _is_ordered(waits: Iterable[_Wait]) -> bool:
    """Return whether all waits come after the signals that they wait for."""
    return all(np.all(signalled < time) for _, signalled, time in waits)


def _batches(waits: Iterable[_Wait], blocks: int, span: int) -> np.ndarray:
    """Return the number of the batch of each block: a block that waits for a later one is in a
    batch with it, and with all blocks between them.

    Args:
        blocks: number of blocks.
        span: number of timestamps of a block.
    """
    numbers = np.arange(blocks)
    reach = numbers.copy()
    for first, signalled, _ in waits:
        latest = (signalled // span).max(axis=_fixed_axes(first), keepdims=True)
        np.maximum.at(reach, *np.broadcast_arrays(first, latest))
    reach = np.maximum.accumulate(reach)
    return np.cumsum(np.append(False, reach[:-1] < numbers[1:]))


def _latest(
    counter: Counter, footprints: Footprints, time: np.ndarray, *, from_axis: int
) -> tuple[np.ndarray, ...]:
    """Return flat arrays of rank, block, owner, granule and the latest ``time`` of the iterations
    along axes from ``from_axis`` on which neither owner nor granule vary."""
    owner, granule = footprints.owner, counter.granules.numbers_of(footprints)
    shape = np.broadcast_shapes(owner.shape, granule.shape)
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and a >= from_axis)
    time = np.where(footprints.mask, time, -1).max(axis=axes, keepdims=True)
    block = footprints.block if from_axis else np.zeros_like(owner)
    return footprints.active(footprints.rank, block, owner, granule, time, mask=time >= 0)


def _fixed_axes(array: np.ndarray) -> tuple[int, ...]:
    """Return the axes along which ``array`` does not vary."""
    return tuple(axis for axis, n in enumerate(array.shape) if n == 1)


def _places_without_mask(footprints: Footprints) -> tuple[int, ...]:
    """Return the axes after those of the loops along which the mask does not vary."""
    loops = 1 + len(footprints.access.loops)
    return tuple(axis for axis in _fixed_axes(footprints.mask) if axis >= loops)


def _verify_room(context: SyncContext, counters: Sequence[Counter]) -> None:
    """Refuse a kernel that waits and occupies all SMs if copies read what it writes: these copies
    need room for a kernel of one block, which waits for the data."""
    waiting = [footprints.access for counter in counters for footprints in counter.users]
    max_blocks = context.options.resident_blocks - 1
    fits = isinstance(context.grid, tirx.IntImm) and int(context.grid) <= max_blocks
    if waiting and not fits:
        raise LanguageError(
            f"{waiting[0].text}, and copies wait beside {format_expr(context.grid)} blocks for "
            f"what these write; expected at most {max_blocks} blocks, one less than "
            f"tileweave.resident_blocks; each may iterate over many tiles{waiting[0].location}"
        )


def leaves_room(context: SyncContext) -> bool:
    """Return whether a kernel of one block is sure to get an SM, so that a plan's copies can begin.

    It is if, on every rank, the launch has fewer blocks than can be resident, or one of the first
    resident blocks never waits.
    """
    if not isinstance(context.grid, tirx.IntImm):
        return False
    blocks, resident = int(context.grid), context.options.resident_blocks
    if blocks < resident:
        return True
    waits = np.zeros((context.world_size, blocks), np.bool_)
    for counter in context.counters:
        if counter.at_exit or counter.also_at_exit:
            waits[:, -1] = True
        for footprints in counter.users:
            mask = footprints.mask
            if counter.own:
                share = counter.granules.numbers_of(footprints) // counter.own
                mask = mask & (share != footprints.rank)
            loop_axes = tuple(range(1 + len(context.program.grid), mask.ndim))
            mask = np.logical_or.reduce(mask, axis=loop_axes, keepdims=True)
            rank, block = combinations([footprints.rank, footprints.block], mask)
            waits[rank, block] = True
    return bool(np.all(np.any(~waits[:, :resident], axis=1)))


def _signal_times(
    context: SyncContext, timestamps: Timestamps, counter: Counter, footprints: Footprints
) -> np.ndarray:
    """Return the timestamp of the signal of an access, in each iteration."""
    depth = signal_depth(context, counter, footprints)
    return timestamps.of_access(footprints, depth, after=True)


def _earliest(
    footprints: Footprints, time: np.ndarray, keys: Sequence[np.ndarray]
) -> tuple[Footprints, np.ndarray]:
    """Merge the iterations that differ only in loops along which no key varies.

    Return the merged footprints, and the least time of each of them. The reads of any row by many
    iterations would else have an entry for each pair of row and iteration.
    """
    shape = np.broadcast_shapes(*(key.shape for key in keys))
    merged = tuple(axis for axis, n in enumerate(shape) if n == 1)
    happens = footprints.mask.any(axis=merged, keepdims=True)
    never = np.iinfo(np.int64).max
    time = np.where(footprints.mask, time, never).min(axis=merged, keepdims=True)
    return replace(footprints, mask=happens), time


def _first_waits(columns: Sequence[np.ndarray], keys: int) -> list[np.ndarray]:
    """Keep the earliest of the waits with equal keys: a block waits for a granule only once.

    Args:
        columns: the waits. The first ``keys`` columns are the keys, the next one is the timestamp.
    """
    order = np.lexsort(columns[keys::-1])
    equal = [a[order][1:] == a[order][:-1] for a in columns[:keys]]
    new = np.concatenate([[True], ~np.logical_and.reduce(equal)])[: len(order)]
    return [a[order[new]] for a in columns]


class _Launch:
    """Simulation of a launch, block by block, and of the copies that read what it writes."""

    def __init__(self, context: SyncContext, timestamps: Timestamps) -> None:
        self._events: dict[tuple[int, int], list] = defaultdict(list)
        self._missing: dict[tuple, int] = {}
        self._context = context
        counters = [c for c in context.counters if not c.at_exit]
        for counter in counters:
            is_ragged = counter.accesses.is_ragged
            for (owner, granule), units in np.ndenumerate(counter.arrivals):
                self._missing[counter, owner, granule] = 0 if is_ragged else int(units)
            for footprints in counter.accesses.in_kernel(counter.kind):
                time = _signal_times(context, timestamps, counter, footprints)
                if is_ragged:
                    self._note_possible(counter, footprints, time)
                else:
                    self._note(counter, footprints, time, True)
            for footprints in counter.users:
                depth = wait_depth(context, counter, footprints)
                self._note(counter, footprints, timestamps.of_access(footprints, depth), False)
        for events in self._events.values():
            events.sort(key=lambda e: e[0])
        self._queues = queues_of(counters)

    def _note(self, counter: Counter, footprints: Footprints, time, signals: bool) -> None:
        units = elements_of(footprints) // counter.unit
        numbers = counter.granules.numbers_of(footprints)
        if not signals:
            keys = footprints.rank, footprints.block, footprints.owner, numbers
            footprints, time = _earliest(footprints, time, keys)
        columns = footprints.active(
            footprints.rank, footprints.block, footprints.owner, numbers, time, units
        )
        if not signals:
            columns = _first_waits(columns, keys=4)
        for r, b, o, g, t, n in zip(*(a.tolist() for a in columns), strict=True):
            self._events[r, b].append((t, (counter, o, g), n if signals else 0, footprints.access))

    def _note_possible(self, counter: Counter, footprints: Footprints, time: np.ndarray) -> None:
        """Note the last signal of each block to each tile of rows that it may write. A wait for the
        rows of a tile needs all of them."""
        columns = _latest(counter, footprints, time, from_axis=1 + len(self._context.program.grid))
        for r, b, o, g, t in zip(*(a.tolist() for a in columns), strict=True):
            self._events[r, b].append((t, (counter, o, g), 1, footprints.access))
            self._missing[counter, o, g] += 1

    def run(self, resident: int) -> None:
        """Run the launch with ``resident`` blocks at a time on each rank.

        Raises:
            LanguageError: it deadlocks.
        """
        blocks = 1 + max(b for _, b in self._events)
        waiting: dict[tuple, list] = defaultdict(list)
        ready = [
            (b, r) for r in range(self._context.world_size) for b in range(min(resident, blocks))
        ]
        heapq.heapify(ready)
        started = [min(resident, blocks)] * self._context.world_size
        position: dict[tuple[int, int], int] = defaultdict(int)
        stuck: dict[tuple[int, int], tuple] = {}

        def wake(granule: tuple) -> None:
            for block_and_rank in waiting.pop(granule, ()):
                heapq.heappush(ready, block_and_rank)

        self._copy(wake)
        while ready:
            block, rank = heapq.heappop(ready)
            events = self._events.get((rank, block), [])
            stuck.pop((rank, block), None)
            while position[rank, block] < len(events):
                _, granule, units, access = events[position[rank, block]]
                if units:
                    self._missing[granule] -= units
                    if self._missing[granule] <= 0:
                        wake(granule)
                        self._copy(wake)
                elif self._missing[granule] > 0:
                    waiting[granule].append((block, rank))
                    stuck[rank, block] = (granule, access)
                    break
                position[rank, block] += 1
            else:
                if started[rank] < blocks:
                    heapq.heappush(ready, (started[rank], rank))
                    started[rank] += 1
        if stuck:
            self._refuse(stuck, position, resident)

    def _copy(self, wake: Callable[[tuple], None]) -> None:
        """Run the copies whose granules have arrived, in stream order."""
        for queue in self._queues:
            while queue and all(self._missing[granule] <= 0 for granule in queue[0].needs):
                for granule in queue.pop(0).produces:
                    self._missing[granule] -= 1
                    wake(granule)

    def _refuse(self, stuck: dict, position: dict[tuple[int, int], int], resident: int) -> None:
        """Refuse a launch in which these blocks wait forever.

        Args:
            stuck: rank and block -> the granule that it waits for, and the access that needs it.
            position: number of events that each block has executed.
        """
        producers: dict[tuple, dict[tuple[int, int], Access]] = defaultdict(dict)
        for place, events in sorted(self._events.items()):
            for _, granule, units, access in events[position[place] :]:
                if units:
                    producers[granule].setdefault(place, access)
        waits_for = {
            place: {p: a for g in self._needed(granule) for p, a in producers[g].items()}
            for place, (granule, _) in stuck.items()
        }
        cycle = _cycle(waits_for)
        first = cycle[0] if cycle else min(stuck, key=_order)
        access = stuck[first][1]
        if cycle:
            pairs = list(zip(cycle, [*cycle[1:], first], strict=True))
            chain = ", which waits for ".join(map(_name, [*cycle[1:], first]))
            chain = chain if len(cycle) > 1 else "itself"
            reads = [stuck[place][1] for place in cycle]
            accesses = dict.fromkeys([*reads, *(waits_for[a][b] for a, b in pairs)])
            legal = "each block to write what others wait for before it reads what they write"
            if any(waits_for[a][b].anchor.same_as(stuck[b][1].anchor) for a, b in pairs):
                legal = "the write in a statement before that of the read: one statement has both"
            raise LanguageError(
                f"{access.text}: a circular wait: {_name(first)} waits for {chain}; expected "
                f"{legal}{arrows((a.kind, a.line) for a in accesses)}"
            )
        raise LanguageError(
            f"{access.text}: {_name(first)} waits for "
            f"{' and '.join(map(_name, list(waits_for[first])[:2]))}, "
            f"and with {resident} resident blocks a rank (tileweave.resident_blocks) the launch "
            "deadlocks; expected blocks to wait for earlier blocks, or fewer waiting blocks"
            f"{access.location}"
        )

    def _needed(self, granule: tuple) -> set[tuple]:
        """Return the granules that must arrive for this one: itself, and what copies read."""
        needed = {granule}
        for queue in self._queues:
            last = next((n for n, copy in enumerate(queue, 1) if granule in copy.produces), 0)
            needed.update(*(copy.needs for copy in queue[:last]))
        return needed


def _cycle(waits_for: Mapping[tuple[int, int], Collection]) -> list[tuple[int, int]]:
    """Return blocks of which each waits for the next one, and the last one for the first; empty if
    all waits lead to blocks that have not started."""
    circular, removed = set(waits_for), True
    while removed:
        removed = {place for place in circular if circular.isdisjoint(waits_for[place])}
        circular -= removed
    if not circular:
        return []
    path = [min(circular, key=_order)]
    while len(set(path)) == len(path):
        path.append(min(circular.intersection(waits_for[path[-1]]), key=_order))
    return path[path.index(path[-1]) : -1]


def _order(place: tuple[int, int]) -> tuple[int, int]:
    return place[::-1]


def _name(place: tuple[int, int]) -> str:
    return f"block {place[1]} of rank {place[0]}"
