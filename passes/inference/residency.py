"""No block waits for what a block brings that cannot run before it."""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np
from tvm import tirx

from ...builtins.errors import LanguageError
from .boxes import Boxes
from .exchange import Exchange
from .granules import Counter, elements_of
from .moments import Moments
from .signals import signal_depth
from .waits import wait_depth


def verify_residency(exchange: Exchange) -> None:
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
    moments = Moments(accesses, exchange.program, exchange.world_size)
    for counter in exchange.counters:
        if counter.at_exit:
            continue
        last = np.full(counter.arrivals.shape, -1, np.int64)
        for boxes in counter.traffic.in_kernel(counter.kind):
            moment = _told(exchange, moments, counter, boxes)
            home, granule, when = boxes.where(boxes.home, counter.granules.of(boxes), moment)
            np.maximum.at(last, (home, granule), when)
        for boxes in exchange.users_of(counter):
            moment = moments.of(boxes, wait_depth(exchange, counter, boxes))
            home, granule, when = boxes.where(boxes.home, counter.granules.of(boxes), moment)
            if np.any(last[home, granule] >= when):
                _Play(exchange, moments).run(exchange.options.resident_blocks)
                return


def leaves_room(exchange: Exchange) -> bool:
    """Whether, on every rank, one of the blocks that run first ends without waiting, or does not
    come: then there is room for the kernel of a block that lets a plan's copies begin."""
    if not isinstance(exchange.grid, tirx.IntImm):
        return False
    blocks, resident = int(exchange.grid), exchange.options.resident_blocks
    if blocks < resident:
        return True
    waits = np.zeros((exchange.world_size, blocks), np.bool_)
    for counter in exchange.counters:
        if counter.at_exit:
            waits[:, -1] = True
        for boxes in exchange.users_of(counter):
            rank, granule, block = boxes.where(boxes.rank, counter.granules.of(boxes), boxes.block)
            if counter.own:
                foreign = granule // counter.own != rank
                rank, block = rank[foreign], block[foreign]
            waits[rank, block] = True
    return bool(np.all(np.any(~waits[:, :resident], axis=1)))


def _told(exchange: Exchange, moments: Moments, counter: Counter, boxes: Boxes) -> np.ndarray:
    """When others are told of an access, in each iteration."""
    depth = signal_depth(exchange, counter, boxes)
    return moments.of_signal(boxes, depth, exchange.sinks.get((counter, boxes)))


class _Play:
    """A launch, block by block."""

    def __init__(self, exchange: Exchange, moments: Moments) -> None:
        self._events: dict[tuple[int, int], list] = defaultdict(list)
        self._missing: dict[tuple, int] = {}
        self._exchange = exchange
        for number, counter in enumerate(exchange.counters):
            if counter.at_exit:
                continue
            for boxes in counter.traffic.in_kernel(counter.kind):
                self._note(number, counter, boxes, _told(exchange, moments, counter, boxes), True)
            for boxes in exchange.users_of(counter):
                depth = wait_depth(exchange, counter, boxes)
                self._note(number, counter, boxes, moments.of(boxes, depth), False)
            copied = counter.is_of_copies
            for (home, granule), units in np.ndenumerate(counter.arrivals):
                self._missing[number, home, granule] = 0 if copied else int(units)
        for events in self._events.values():
            events.sort(key=lambda e: (e[0], not e[2]))  # a signal stands before a wait

    def _note(self, number: int, counter: Counter, boxes: Boxes, moment, signals: bool) -> None:
        units = elements_of(boxes) // counter.unit
        rank, home, *_, granule, when, block, count = boxes.flat(
            counter.granules.of(boxes), moment, boxes.block, units
        )
        for r, h, g, t, b, n in zip(
            *(a.tolist() for a in (rank, home, granule, when, block, count)), strict=True
        ):
            self._events[r, b].append((t, (number, h, g), n if signals else 0, boxes.access))

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
        while ready:
            block, rank = heapq.heappop(ready)
            events = self._events.get((rank, block), [])
            stuck.pop((rank, block), None)
            while at[rank, block] < len(events):
                _, what, units, access = events[at[rank, block]]
                if units:
                    self._missing[what] -= units
                    if self._missing[what] <= 0:
                        for one in waiting.pop(what, ()):
                            heapq.heappush(ready, one)
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

    def _refuse(self, stuck: dict, resident: int) -> None:
        (rank, block), (what, access) = min(stuck.items(), key=lambda item: item[0][::-1])
        bringing = [
            f"block {b} of rank {r}" for (r, b), events in sorted(self._events.items())
            if any(e[1] == what and e[2] for e in events)
        ]  # fmt: skip
        raise LanguageError(
            f"{access.text}: block {block} of rank {rank} waits for {' and '.join(bringing[:2])}, "
            f"and with {resident} resident blocks a rank (tileweave.resident_blocks) nobody can go "
            "on; expected blocks to wait for earlier blocks, or fewer of them to wait at a time"
            f"{access.location}"
        )
