"""No block waits for what a block brings that cannot run before it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.walk import format_expr
from ..regions.footprints import Footprints, combinations
from ..regions.granules import Counter, elements_of
from ..regions.schedule import Timestamps
from .context import SyncContext
from .copy_deps import queues_of
from .signals import signal_depth
from .waits import wait_depth


def verify_residency(exchange: SyncContext) -> None:
    """Refuse a program that may stand still because waiting blocks leave no room for those they
    wait for.

    Blocks of a launch start in order. A wait is safe with any number of resident blocks if all that
    bring what it waits for are earlier blocks, of any rank, or earlier in the same block; then, and
    only then, nothing more is computed. Else the launch is played through with
    ``tileweave.resident_blocks`` at a time.

    Raises:
        LanguageError: names the wait's access and a block that it waits for.
    """
    every = ("read", "write", "add")
    accesses = [b.access for t in exchange.traffic for b in t.in_kernel(*every)]
    moments = Timestamps(accesses, exchange.program, exchange.world_size)
    counters = [c for c in exchange.counters if not c.at_exit]
    if any(c.by_copies for c in counters):
        _verify_room(exchange, counters)
    last: dict[Counter, np.ndarray] = {}
    for counter in counters:
        last[counter] = np.full(counter.arrivals.shape, -1, np.int64)
        for footprints in counter.traffic.in_kernel(counter.kind):
            moment = _told(exchange, moments, counter, footprints)
            home, granule, when = footprints.where(
                footprints.owner, counter.granules.of(footprints), moment
            )
            np.maximum.at(last[counter], (home, granule), when)
    for queue in queues_of(counters):
        now = -1
        for copy in queue:
            now = max([now, *(last[c][tuple(at)] for c, *at in copy.needs)])
            for c, *at in copy.brings:
                last[c][tuple(at)] = max(last[c][tuple(at)], now)
    for counter in counters:
        for footprints in counter.users:
            told = last[counter][footprints.owner, counter.granules.of(footprints)]
            told = np.where(footprints.mask, told, -1)
            # What varies along an axis alone decides by its least or greatest there.
            first = footprints.block.min(axis=_fixed(told), keepdims=True)
            moment = moments.of(footprints, wait_depth(exchange, counter, footprints), block=first)
            if np.any(told.max(axis=_fixed(moment), keepdims=True) >= moment):
                _Play(exchange, moments).run(exchange.options.resident_blocks)
                return


def _fixed(array: np.ndarray) -> tuple[int, ...]:
    """The axes along which it does not vary."""
    return tuple(axis for axis, n in enumerate(array.shape) if n == 1)


def _verify_room(exchange: SyncContext, counters: Sequence[Counter]) -> None:
    """Refuse a kernel that waits, and takes all SMs, where copies take what it brings: a kernel of
    a block must run beside it, which waits for that."""
    waiting = [footprints.access for counter in counters for footprints in counter.users]
    most = exchange.options.resident_blocks - 1
    few = isinstance(exchange.grid, tirx.IntImm) and int(exchange.grid) <= most
    if waiting and not few:
        raise LanguageError(
            f"{waiting[0].text}, and copies wait beside {format_expr(exchange.grid)} blocks for what "
            f"these bring; expected at most {most} blocks, one less than tileweave.resident_blocks,"
            f" each of which may walk over many tiles{waiting[0].location}"
        )


def leaves_room(exchange: SyncContext) -> bool:
    """Whether, on every rank, one of the blocks that run first ends without waiting, or does not
    come: then there is room for the kernel of a block that lets a plan's copies begin."""
    if not isinstance(exchange.grid, tirx.IntImm):
        return False
    blocks, resident = int(exchange.grid), exchange.options.resident_blocks
    if blocks < resident:
        return True
    waits = np.zeros((exchange.world_size, blocks), np.bool_)
    for counter in exchange.counters:
        if counter.at_exit or counter.also_at_exit:
            waits[:, -1] = True
        for footprints in counter.users:
            here = footprints.mask
            if counter.own:
                here = here & (counter.granules.of(footprints) // counter.own != footprints.rank)
            within = tuple(range(1 + len(exchange.program.grid), here.ndim))
            here = np.logical_or.reduce(here, axis=within, keepdims=True)
            rank, block = combinations([footprints.rank, footprints.block], here)
            waits[rank, block] = True
    return bool(np.all(np.any(~waits[:, :resident], axis=1)))


def _told(
    exchange: SyncContext, moments: Timestamps, counter: Counter, footprints: Footprints
) -> np.ndarray:
    """When others are told of an access, in each iteration."""
    depth = signal_depth(exchange, counter, footprints)
    return moments.of(footprints, depth, after=True)


def _first(found: Sequence[np.ndarray], keys: int) -> list[np.ndarray]:
    """Of entries with the same ``keys`` first numbers the one whose next is least: a block that has
    waited for something need not again."""
    order = np.lexsort(found[keys::-1])
    same = [a[order][1:] == a[order][:-1] for a in found[:keys]]
    new = np.concatenate([[True], ~np.logical_and.reduce(same)])[: len(order)]
    return [a[order[new]] for a in found]


class _Play:
    """A launch, block by block, and the copies that take what it brings."""

    def __init__(self, exchange: SyncContext, moments: Timestamps) -> None:
        self._events: dict[tuple[int, int], list] = defaultdict(list)
        self._missing: dict[tuple, int] = {}
        self._exchange = exchange
        counters = [c for c in exchange.counters if not c.at_exit]
        for counter in counters:
            for footprints in counter.traffic.in_kernel(counter.kind):
                self._note(counter, footprints, _told(exchange, moments, counter, footprints), True)
            for footprints in counter.users:
                depth = wait_depth(exchange, counter, footprints)
                self._note(counter, footprints, moments.of(footprints, depth), False)
            for (home, granule), units in np.ndenumerate(counter.arrivals):
                self._missing[counter, home, granule] = int(units)
        for events in self._events.values():
            events.sort(key=lambda e: e[0])
        self._queues = queues_of(counters)

    def _note(self, counter: Counter, footprints: Footprints, moment, signals: bool) -> None:
        units = elements_of(footprints) // counter.unit
        found = footprints.where(
            footprints.rank,
            footprints.block,
            footprints.owner,
            counter.granules.of(footprints),
            moment,
            units,
        )
        if not signals:
            found = _first(found, keys=4)
        for r, b, h, g, t, n in zip(*(a.tolist() for a in found), strict=True):
            self._events[r, b].append((t, (counter, h, g), n if signals else 0, footprints.access))

    def run(self, resident: int) -> None:
        blocks = 1 + max(b for _, b in self._events)
        waiting: dict[tuple, list] = defaultdict(list)
        ready = [
            (b, r) for r in range(self._exchange.world_size) for b in range(min(resident, blocks))
        ]
        heapq.heapify(ready)
        started = [min(resident, blocks)] * self._exchange.world_size
        at: dict[tuple[int, int], int] = defaultdict(int)
        stuck: dict[tuple[int, int], tuple] = {}

        def wake(what: tuple) -> None:
            for one in waiting.pop(what, ()):
                heapq.heappush(ready, one)

        self._copy(wake)
        while ready:
            block, rank = heapq.heappop(ready)
            events = self._events.get((rank, block), [])
            stuck.pop((rank, block), None)
            while at[rank, block] < len(events):
                _, what, units, access = events[at[rank, block]]
                if units:
                    self._missing[what] -= units
                    if self._missing[what] <= 0:
                        wake(what)
                        self._copy(wake)
                elif self._missing[what] > 0:
                    waiting[what].append((block, rank))
                    stuck[rank, block] = (what, access)
                    break
                at[rank, block] += 1
            else:
                if started[rank] < blocks:
                    heapq.heappush(ready, (started[rank], rank))
                    started[rank] += 1
        if stuck:
            self._refuse(stuck, resident)

    def _copy(self, wake: Callable[[tuple], None]) -> None:
        """Let streams copy what they have waited for."""
        for queue in self._queues:
            while queue and all(self._missing[what] <= 0 for what in queue[0].needs):
                for what in queue.pop(0).brings:
                    self._missing[what] -= 1
                    wake(what)

    def _refuse(self, stuck: dict, resident: int) -> None:
        (rank, block), (what, access) = min(stuck.items(), key=lambda item: item[0][::-1])
        wanted = {what}
        for queue in self._queues:
            last = next((n for n, copy in enumerate(queue, 1) if what in copy.brings), 0)
            wanted.update(*(copy.needs for copy in queue[:last]))
        bringing = [
            f"block {b} of rank {r}" for (r, b), events in sorted(self._events.items())
            if any(e[1] in wanted and e[2] for e in events)
        ]  # fmt: skip
        raise LanguageError(
            f"{access.text}: block {block} of rank {rank} waits for {' and '.join(bringing[:2])}, "
            f"and with {resident} resident blocks a rank (tileweave.resident_blocks) nobody can go "
            "on; expected blocks to wait for earlier blocks, or fewer of them to wait at a time"
            f"{access.location}"
        )
