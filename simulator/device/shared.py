"""Shared memory of one block by address, with a shadow that finds unordered accesses.

The shadow stores, for each byte, the number of the last write, and of the last read and the last
atomic operation by each agent. A log has agent, time and source of each number. Agents are those of
``BlockOrder``: thread groups, bulk stores, asynchronous loads. Threads of one thread group are
assumed to run in lockstep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..memory.clock import Clock
from ..memory.memory import Memory
from ..memory.order import BlockOrder
from ..report.errors import SimulationError, read_before_write

_WIDEST = 16
"""Bytes of the widest chunk, and the multiple of the size of the arrays."""
_EVER = np.iinfo(np.int32).max
_CANARY = 0xFF
"""Byte of uninitialized memory: NaN in every floating-point type."""


@dataclass(frozen=True)
class Source:
    """Operation and location of an access to shared memory, for reports.

    Attributes:
        wait: what waits for the access, if it is asynchronous.
    """

    op: str
    loc: str
    wait: str = ""


class Agents:
    """Agents of a block, by numbers from 0, and what happens before the next access of each thread
    group.

    Attributes:
        clocks: for each thread group, the clock of what a proxy fence has ordered before its next
            asynchronous access.
        name: function from the number of an agent to its name.
    """

    def __init__(self, order: BlockOrder, name: Callable[[int], str]) -> None:
        self.order, self.name = order, name
        self.clocks = list(order.clock)
        groups, count = order.layout.thread_groups, order.layout.stride
        self._rows = {"known": _Rows(order.base, groups, count)}
        self._rows["fenced"] = _Rows(order.base, groups, count)

    def known(self) -> np.ndarray:
        """Return ``[g, a]``: the last time of agent ``a`` that happens before the next access of
        thread group ``g``."""
        return self._rows["known"].of(self.order.clock, own=True)

    def fenced(self) -> np.ndarray:
        """Return ``[g, a]``: the last time of agent ``a`` that a proxy fence has ordered before
        the next asynchronous access of thread group ``g``."""
        return self._rows["fenced"].of(self.clocks, own=False)

    def fence_proxy(self, thread_groups: tuple[int, ...]) -> None:
        """Order what happens before this point before asynchronous accesses after it."""
        order = self.order
        for g in thread_groups:
            self.clocks[g] = order.clock[g].with_times({order.base + g: order.time[g]})
            order.time[g] += 1

    def join_fences(self, thread_groups: tuple[int, ...], clock: Clock | None = None) -> None:
        """Join the proxy fences of these groups and, if given, of ``clock``."""
        joined = self.clocks[thread_groups[0]] if clock is None else clock
        for g in thread_groups:
            joined = joined.joined(self.clocks[g])
        for g in thread_groups:
            self.clocks[g] = joined


class _Rows:
    """Times of the agents of one block in the clocks of its thread groups."""

    def __init__(self, base: int, groups: int, count: int) -> None:
        self._agents = np.arange(base, base + count)
        self._clocks: list[Any] = [None] * groups
        self._times = np.zeros((groups, count), np.int32)

    def of(self, clocks: Sequence[Clock], own: bool) -> np.ndarray:
        for g, clock in enumerate(clocks):
            if clock is not self._clocks[g]:
                self._clocks[g], self._times[g] = clock, clock.times(self._agents)
                if own:
                    self._times[g, g] = _EVER
        return self._times


class Chunks(NamedTuple):
    """Bytes of shared memory in aligned chunks, which NumPy accesses faster than single bytes.

    Attributes:
        numbers: number of each chunk from address 0, a row for each thread or thread group.
        width: bytes of a chunk.
    """

    numbers: np.ndarray
    width: int

    @staticmethod
    def at(addresses: np.ndarray, width: int) -> Chunks:
        """Return ``width`` bytes from each address on, a row for each address."""
        chunk = math.gcd(width, _WIDEST, int(np.bitwise_or.reduce(addresses, axis=None)))
        numbers = addresses[..., None] // chunk + np.arange(width // chunk)
        return Chunks(numbers, chunk)

    def view(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, self.width)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return the elements of an array over all bytes, with an axis for those of a chunk."""
        return self.view(array)[self.numbers]

    def put(self, array: np.ndarray, values: Any) -> None:
        self.view(array)[self.numbers] = values

    def rows(self, key: Any) -> Chunks:
        return Chunks(self.numbers[key], self.width)

    def first(self, where: np.ndarray) -> tuple[int, int]:
        """Return row and address of the first byte of a mask, whose rows are these or share
        these."""
        row, *chunk, byte = np.argwhere(where)[0].tolist()
        number = np.broadcast_to(self.numbers, where.shape[:-1])[(row, *chunk)]
        return row, int(number) * self.width + byte


class _Log:
    """Accesses by number; 0 precedes all others."""

    def __init__(self) -> None:
        self._agents, self._times = np.zeros(64, np.int32), np.zeros(64, np.int32)
        self._generic = np.zeros(64, np.bool_)
        self.sources = [Source("", "")]

    def add(self, agent: int, time: int, source: Source, generic: bool = True) -> int:
        """Return the number of a new access, made by the generic proxy or not."""
        number = len(self.sources)
        if number == len(self._times):
            self._agents, self._times, self._generic = (
                np.concatenate([a, np.zeros_like(a)])
                for a in (self._agents, self._times, self._generic)
            )
        self._agents[number], self._times[number] = agent, time
        self._generic[number] = generic
        self.sources.append(source)
        return number

    @property
    def agents(self) -> np.ndarray:
        return self._agents[: len(self.sources)]

    @property
    def times(self) -> np.ndarray:
        return self._times[: len(self.sources)]

    @property
    def generic(self) -> np.ndarray:
        return self._generic[: len(self.sources)]


class _LastAccesses:
    """Number of the last access of one kind to each byte, by agent."""

    def __init__(self, verb: str, size: int) -> None:
        self.verb, self._size, self.log = verb, size, _Log()
        self.by_agent: dict[int, np.ndarray] = {}
        self.latest: dict[int, int] = {}
        """Time of the last access of each agent."""

    def note(self, agent: int, chunks: Chunks, time: int, source: Source) -> None:
        if agent not in self.by_agent:
            self.by_agent[agent] = np.zeros(self._size, np.int32)
        chunks.put(self.by_agent[agent], self.log.add(agent, time, source))
        self.latest[agent] = time

    def clear(self, chunks: Chunks) -> None:
        for numbers in self.by_agent.values():
            chunks.put(numbers, 0)


class SharedMemory:
    """Shared memory of one block.

    Args:
        tiles: offset and name of each tile in it.
        memory: global memory, which has the explanation of poison.
    """

    def __init__(
        self, name: str, size: int, tiles: Sequence[tuple[int, str]], agents: Agents, memory: Memory
    ) -> None:  # fmt: skip
        self.name, self.size, self._tiles = name, size, tiles
        self.agents, self._memory = agents, memory
        size += -size % _WIDEST
        self.bytes = np.full(size, _CANARY, np.uint8)
        self.poison = np.ones(size, np.bool_)
        self._written, self._writes = np.zeros(size, np.int32), _Log()
        """Number of the last write of each byte."""
        self._unwritten: dict[int, str] = {}
        """Explanation of poison, as in ``Memory``, by the number of the write that stored it."""
        self._reads, self._atomics = _LastAccesses("read", size), _LastAccesses("changed", size)

    def load(
        self, addresses: np.ndarray, width: int, dtype: np.dtype, groups: np.ndarray, source: Source
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Load ``width`` bytes at each address by generic accesses.

        Args:
            groups: thread group of each address.

        Returns:
            Values, with an axis of ``width / itemsize`` lanes, and the mask of poison values.
        """
        chunks = self._span(addresses, width, source)
        self._require_ordered(chunks, groups, source, self._atomics)
        self._note(self._reads, chunks, groups, source)
        values, bad = self.values(chunks, dtype, source)
        rows = len(addresses), width // dtype.itemsize
        return values.reshape(rows), None if bad is None else bad.reshape(rows)

    def update(
        self, addresses: np.ndarray, operands: np.ndarray, combine: Callable[[Any, Any], Any],
        groups: np.ndarray, source: Source,
    ) -> np.ndarray:  # fmt: skip
        """Combine elements with ``operands`` by atomic operations, in the order of the threads.

        Returns:
            The values before, a row for each address.
        """
        dtype, lanes = operands.dtype, operands.shape[1]
        first = addresses[:, None] + np.arange(lanes) * dtype.itemsize
        chunks = self._span(first.reshape(-1), dtype.itemsize, source)
        of_lanes = np.repeat(groups, lanes)
        self._require_ordered(chunks, of_lanes, source, self._reads)
        self._note(self._atomics, chunks, of_lanes, source)
        old, flat = np.empty(len(of_lanes), dtype), operands.reshape(-1)
        left = np.arange(len(of_lanes))
        while left.size:  # in each turn one operation on each element
            turn = left[np.unique(chunks.numbers[left, 0], return_index=True)[1]]
            values, bad = self.values(chunks.rows(turn), dtype, source)
            if bad is not None:
                raise SimulationError(
                    "poison", f"{source.op}, which is uninitialized\n --> {source.loc}"
                )
            old[turn] = values.reshape(-1)
            new = np.ascontiguousarray(np.asarray(combine(old[turn], flat[turn])).astype(dtype))
            target = chunks.rows(turn)
            target.put(self.bytes, new.view(np.uint8).reshape(*target.numbers.shape, -1))
            left = np.setdiff1d(left, turn, assume_unique=True)
        return old.reshape(operands.shape)

    def store(
        self, addresses: np.ndarray, values: np.ndarray, poison: Any, groups: np.ndarray,
        source: Source,
    ) -> None:  # fmt: skip
        """Store a row of ``values`` at each address by generic accesses."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(addresses), -1)
        chunks = self._span(addresses, raw.shape[1], source)
        shape = (*chunks.numbers.shape, chunks.width)
        self._require_ordered(chunks, groups, source, self._reads, self._atomics)
        self._require_one_writer(chunks, raw.reshape(shape), source)
        chunks.put(self.bytes, raw.reshape(shape))
        bad = _by_byte(poison, raw.shape, values.dtype.itemsize)
        chunks.put(self.poison, bad if bad is False else bad.reshape(shape))
        numbers = np.zeros(len(self.agents.order.time), np.int32)
        for g in _distinct(groups):
            numbers[g] = self._writes.add(g, self.agents.order.time[g], source)
            if bad is not False:
                self._unwritten[int(numbers[g])] = self._memory.unwritten
        self._end_write(chunks, numbers[groups][:, None, None])

    def read_async(
        self, chunks: Chunks, groups: np.ndarray, readers: Sequence[tuple[int, int]], source: Source
    ) -> None:
        """Note asynchronous reads at the request of thread groups.

        Args:
            chunks: bytes of each group, or one row that all groups read.
            readers: agent and time of the read of each group.
        """
        self._require_ordered(chunks, groups, source, self._atomics)
        self._require_fenced(chunks, groups, source, "reads")
        is_shared = len(chunks.numbers) == 1
        for row, (agent, time) in enumerate(readers):
            self._reads.note(agent, chunks.rows(0 if is_shared else row), time, source)

    def write_async(
        self, chunks: Chunks, data: np.ndarray, poison: np.ndarray | None, groups: np.ndarray,
        writers: Mapping[int, tuple[int, int]], source: Source, generic: bool = False,
    ) -> None:  # fmt: skip
        """Write elements asynchronously at the request of thread groups.

        Args:
            groups: thread group that requests each row of ``chunks``.
            writers: agent and time of the write of each group.
            generic: whether it writes by the generic proxy, as ``cp.async`` does.
        """
        shape = (*chunks.numbers.shape, chunks.width)
        self._require_ordered(chunks, groups, source, self._reads, self._atomics)
        if not generic:
            self._require_fenced(chunks, groups, source, "overwrites")
        chunks.put(self.bytes, data.view(np.uint8).reshape(shape))
        bad: Any = False
        if poison is not None and poison.any():
            bad = np.repeat(poison, data.dtype.itemsize).reshape(shape)
        chunks.put(self.poison, bad)
        of_groups = np.zeros(max(writers) + 1, np.int32)
        for g, (agent, time) in writers.items():
            of_groups[g] = self._writes.add(agent, time, source, generic)
            if bad is not False:
                self._unwritten[int(of_groups[g])] = self._memory.unwritten
        numbers = of_groups[groups].reshape(-1, *[1] * chunks.numbers.ndim)
        self._end_write(chunks, numbers)
        if len(writers) > 1:
            others = chunks.of(self._written) != numbers
            self._refuse(chunks, others, groups, source, "written", self._writes, self._written)

    def values(
        self, chunks: Chunks, dtype: np.dtype, source: Source
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the elements of each chunk and their poison, without an access. If an element is
        wider than a chunk, the chunks of a row are joined."""
        raw, bad = chunks.of(self.bytes), chunks.of(self.poison)
        if chunks.width < dtype.itemsize:
            raw, bad = (a.reshape(len(a), -1) for a in (raw, bad))
        values = raw.view(dtype)
        if not bad.any():
            return values, None
        self._note_poison(chunks, source)
        return values, bad.reshape(*values.shape, dtype.itemsize).any(axis=-1)

    def _note_poison(self, chunks: Chunks, source: Source) -> None:
        """Note that poison is read from some of these bytes."""
        _, byte = chunks.first(chunks.of(self.poison))
        explanation = self._unwritten.get(int(self._written[byte]))
        self._memory.unwritten = explanation or read_before_write(self._tile(byte), source.loc)

    def _tile(self, byte: int) -> str:
        """Return the names of the tiles that begin at or last before a byte."""
        begin = max((offset for offset, _ in self._tiles if offset <= byte), default=0)
        return " or ".join(name for offset, name in self._tiles if offset == begin) or self.name

    def _span(self, addresses: np.ndarray, width: int, source: Source) -> Chunks:
        if not addresses.size:  # no thread takes this side of a T.if_then_else
            return Chunks(np.empty((0, 1), np.int64), math.gcd(width, _WIDEST))
        low, high = int(addresses.min()), int(addresses.max()) + width
        if low < 0 or high > self.size:
            raise SimulationError(
                "bounds",
                f"{source.op} of bytes {low} to {high - 1} of {self.name}, which has "
                f"{self.size} bytes\n --> {source.loc}",
            )
        if (addresses % min(width, 16)).any():
            raise SimulationError(
                "alignment",
                f"{source.op} of {width} bytes of {self.name} at {int(addresses[0])}; expected a "
                f"multiple of {min(width, 16)}\n --> {source.loc}",
            )
        return Chunks.at(addresses, width)

    def _require_ordered(
        self, chunks: Chunks, groups: np.ndarray, source: Source, *conflicts: _LastAccesses
    ) -> None:
        """Refuse an access that is not ordered after the last write and conflicting accesses.

        Args:
            chunks: bytes of each of ``groups``, or one row that all groups access.
        """
        ordered = self.agents.known()
        least = ordered[_distinct(groups)].min(axis=0, initial=_EVER)
        rows, log = groups[:, None, None], self._writes
        last = self._last_among(chunks, least[log.agents] < log.times)
        if last is not None:
            self._refuse(
                chunks, ordered[rows, log.agents[last]] < log.times[last], groups, source,
                "written", log, self._written,
            )  # fmt: skip
        for accesses in conflicts:
            log = accesses.log
            for agent, numbers in accesses.by_agent.items():
                if least[agent] < accesses.latest[agent]:
                    self._refuse(
                        chunks, ordered[rows, agent] < log.times[chunks.of(numbers)], groups,
                        source, accesses.verb, log, numbers,
                    )  # fmt: skip

    def _last_among(self, chunks: Chunks, writes: np.ndarray) -> np.ndarray | None:
        """Return the last write of each byte, or None if none of them is in a mask of all."""
        last = chunks.of(self._written) if writes.any() else None
        return None if last is None or not writes[last].any() else last

    def _require_fenced(
        self, chunks: Chunks, groups: np.ndarray, source: Source, verb: str
    ) -> None:
        """Refuse an asynchronous access after generic writes that no proxy fence has ordered."""
        fenced, rows, log = self.agents.fenced(), groups[:, None, None], self._writes
        least, bad, numbers = fenced[groups].min(axis=0), np.zeros(0, np.bool_), self._written
        last = self._last_among(chunks, log.generic & (least[log.agents] < log.times))
        if last is not None:
            bad = log.generic[last] & (fenced[rows, log.agents[last]] < log.times[last])
        for agent, of_atomics in self._atomics.by_agent.items():
            if not bad.any():
                log, numbers = self._atomics.log, of_atomics
                bad = fenced[rows, agent] < log.times[chunks.of(numbers)]
        if bad.any():
            _, byte = chunks.first(bad)
            before = log.sources[numbers[byte]]
            raise SimulationError(
                "race",
                f"{source.op} {verb} byte {byte} of {self.name} by the asynchronous proxy, and no "
                f"fence.proxy.async is between it and {before.op} --> {before.loc}\n"
                f" --> {source.loc}",
            )

    def _require_one_writer(self, chunks: Chunks, raw: np.ndarray, source: Source) -> None:
        """Refuse a store in which two threads write different values to one byte."""
        before = chunks.of(self.bytes)
        chunks.put(self.bytes, raw)
        differs = chunks.of(self.bytes) != raw
        chunks.put(self.bytes, before)
        if differs.any():
            _, byte = chunks.first(differs)
            raise SimulationError(
                "race",
                f"two threads store different values to byte {byte} of {self.name} at once"
                f"\n --> {source.loc}",
            )

    def _note(
        self, accesses: _LastAccesses, chunks: Chunks, groups: np.ndarray, source: Source
    ) -> None:
        """Note accesses of thread groups now."""
        for g in _distinct(groups):
            accesses.note(g, chunks.rows(groups == g), self.agents.order.time[g], source)

    def _end_write(self, chunks: Chunks, number: Any) -> None:
        """Note the number of a write, before which all earlier accesses happen."""
        chunks.put(self._written, number)
        self._reads.clear(chunks)
        self._atomics.clear(chunks)

    def _refuse(
        self, chunks: Chunks, bad: np.ndarray, groups: np.ndarray, source: Source, verb: str,
        log: _Log, numbers: np.ndarray,
    ) -> None:  # fmt: skip
        """Refuse an access that is not ordered after earlier ones, where ``bad`` is true."""
        if not bad.any():
            return
        row, byte = chunks.first(bad)
        number, name = int(numbers[byte]), self.agents.name
        before, own, agent = log.sources[number], name(int(groups[row])), int(log.agents[number])
        missing = ""
        if before.wait:
            is_running = (self.agents.known()[:, agent] < log.times[number]).all()
            missing = (
                f"\nit may still be running; expected {before.wait} between the two"
                if is_running
                else "\nonly other threads have waited for it; expected T.sync_threads after that"
            )
        raise SimulationError(
            "race",
            f"{source.op} at byte {byte} of {self.name} by {own}\nis not ordered "
            f"after {before.op} by {name(agent)}, which has {verb} it --> "
            f"{before.loc}\n --> {source.loc}{missing}",
        )


def _distinct(groups: np.ndarray) -> list[int]:
    """Return the thread groups among these."""
    return np.flatnonzero(np.bincount(groups)).tolist()


def _by_byte(poison: Any, shape: tuple[int, int], itemsize: int) -> Any:
    """Return the poison of each byte of rows of values."""
    if poison is None or poison is False:
        return False
    bad = np.broadcast_to(
        np.asarray(poison).reshape(shape[0] if np.ndim(poison) else 1, -1),
        (shape[0], shape[1] // itemsize),
    )
    return np.repeat(bad, itemsize, axis=1)
