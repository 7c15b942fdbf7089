"""Shared memory of one block by address, with a shadow that finds unordered accesses.

The shadow stores, for each byte, the agent, time and source of the last write, and the time and
source of the last read and the last atomic operation by each agent. Agents are those of
``BlockOrder``: thread groups, bulk stores, asynchronous loads. Threads of one thread group are
assumed to run in lockstep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..memory.clock import Clock
from ..memory.order import BlockOrder
from ..report.errors import SimulationError

_EVER = np.iinfo(np.int32).max
_CANARY = 0xFF
"""Byte of uninitialized memory: NaN in every floating-point type."""


@dataclass(frozen=True)
class Source:
    """Operation and location of an access to shared memory, for reports."""

    op: str
    loc: str


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


class _LastAccesses:
    """Last access of one kind to each byte, by agent: its time, and the number of its source."""

    def __init__(self, verb: str, size: int) -> None:
        self.verb, self._size = verb, size
        self.by_agent: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def note(self, agent: int, offsets: np.ndarray, time: int, source: int) -> None:
        if agent not in self.by_agent:
            self.by_agent[agent] = np.zeros(self._size, np.int32), np.zeros(self._size, np.int32)
        times, sources = self.by_agent[agent]
        times[offsets], sources[offsets] = time, source

    def clear(self, offsets: np.ndarray) -> None:
        for times, _ in self.by_agent.values():
            times[offsets] = 0


class SharedMemory:
    """Shared memory of one block."""

    def __init__(self, name: str, size: int, agents: Agents) -> None:
        self.name, self.agents = name, agents
        self.bytes = np.full(size, _CANARY, np.uint8)
        self.poison = np.ones(size, np.bool_)
        self._writer = np.zeros(size, np.int32)
        self._written = np.zeros(size, np.int32)
        self._asynchronous = np.zeros(size, np.bool_)
        """True if the last write was made by the asynchronous proxy."""
        self._write_source = np.zeros(size, np.int32)
        self._reads, self._atomics = _LastAccesses("read", size), _LastAccesses("changed", size)
        self._sources: dict[Source, int] = {}
        """Numbers of the sources so far, in their order."""

    def load(
        self, addresses: np.ndarray, width: int, dtype: np.dtype, groups: np.ndarray, source: Source
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Load ``width`` bytes at each address by generic accesses.

        Args:
            groups: thread group of each address.

        Returns:
            Values, with an axis of ``width / itemsize`` lanes, and the mask of poison values.
        """
        offsets = self._span(addresses, width, source)
        self._require_ordered(offsets, groups, source, self._atomics)
        self._note(self._reads, offsets, groups, source)
        return self.values(offsets, dtype)

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
        offsets = self._span(first.reshape(-1), dtype.itemsize, source)
        of_lanes = np.repeat(groups, lanes)
        self._require_ordered(offsets, of_lanes, source, self._reads)
        self._note(self._atomics, offsets, of_lanes, source)
        old, flat = np.empty(len(offsets), dtype), operands.reshape(-1)
        left = np.arange(len(offsets))
        while left.size:  # in each turn one operation on each element
            turn = left[np.unique(offsets[left, 0], return_index=True)[1]]
            values, bad = self.values(offsets[turn], dtype)
            if bad is not None:
                raise SimulationError(
                    "poison", f"{source.op}, which is uninitialized\n --> {source.loc}"
                )
            old[turn] = values[:, 0]
            new = np.ascontiguousarray(np.asarray(combine(old[turn], flat[turn])).astype(dtype))
            self.bytes[offsets[turn]] = new.view(np.uint8).reshape(len(turn), -1)
            left = np.setdiff1d(left, turn, assume_unique=True)
        return old.reshape(operands.shape)

    def store(
        self, addresses: np.ndarray, values: np.ndarray, poison: Any, groups: np.ndarray,
        source: Source,
    ) -> None:  # fmt: skip
        """Store a row of ``values`` at each address by generic accesses."""
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(len(addresses), -1)
        offsets = self._span(addresses, raw.shape[1], source)
        self._require_ordered(offsets, groups, source, self._reads, self._atomics)
        self._require_one_writer(offsets, raw, source)
        self.bytes[offsets] = raw
        self.poison[offsets] = _by_byte(poison, raw.shape, values.dtype.itemsize)
        self._writer[offsets] = groups[:, None]
        self._written[offsets] = np.asarray(self.agents.order.time, np.int32)[groups][:, None]
        self._asynchronous[offsets] = False
        self._end_write(offsets, source)

    def read_async(
        self, offsets: np.ndarray, group: int, agent: int, time: int, source: Source
    ) -> None:
        """Note that ``agent`` reads these bytes asynchronously, at the request of ``group``."""
        self._require_fenced(offsets, group, source)
        self._require_ordered(offsets[None], np.array([group]), source, self._atomics)
        self._reads.note(agent, offsets, time, self._number(source))

    def write_async(
        self, offsets: np.ndarray, data: np.ndarray, poison: Any, group: int, agent: int, time: int,
        source: Source, generic: bool = False,
    ) -> None:  # fmt: skip
        """Write bytes by ``agent`` asynchronously, at the request of ``group``.

        Args:
            generic: whether it writes by the generic proxy, as ``cp.async`` does.
        """
        groups = np.array([group])
        self._require_ordered(offsets[None], groups, source, self._reads, self._atomics)
        self.bytes[offsets] = data
        self.poison[offsets] = False if poison is None else poison
        self._writer[offsets], self._written[offsets] = agent, time
        self._asynchronous[offsets] = not generic
        self._end_write(offsets, source)

    def values(self, offsets: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the elements at these bytes and their poison, without an access."""
        values = np.ascontiguousarray(self.bytes[offsets]).view(dtype)
        bad = self.poison[offsets]
        if not bad.any():
            return values, None
        return values, bad.reshape(*values.shape, dtype.itemsize).any(axis=-1)

    def _span(self, addresses: np.ndarray, width: int, source: Source) -> np.ndarray:
        if not addresses.size:  # no thread takes this side of a T.if_then_else
            return np.empty((0, width), np.int64)
        low, high = int(addresses.min()), int(addresses.max()) + width
        if low < 0 or high > len(self.bytes):
            raise SimulationError(
                "bounds",
                f"{source.op} of bytes {low} to {high - 1} of {self.name}, which has "
                f"{len(self.bytes)} bytes\n --> {source.loc}",
            )
        if (addresses % min(width, 16)).any():
            raise SimulationError(
                "alignment",
                f"{source.op} of {width} bytes of {self.name} at {int(addresses[0])}; expected a "
                f"multiple of {min(width, 16)}\n --> {source.loc}",
            )
        return addresses[:, None] + np.arange(width)

    def _require_ordered(
        self, offsets: np.ndarray, groups: np.ndarray, source: Source, *conflicts: _LastAccesses
    ) -> None:
        """Refuse an access that is not ordered after the last write and conflicting accesses.

        Args:
            offsets: bytes, a row for each of ``groups``.
        """
        ordered = self.agents.known()
        rows = groups[:, None]
        bad = ordered[rows, self._writer[offsets]] < self._written[offsets]
        if bad.any():
            row, column = np.argwhere(bad)[0]
            byte = int(offsets[row, column])
            raise self._race(
                byte, int(self._writer[byte]), int(self._write_source[byte]), int(groups[row]),
                source, "written",
            )  # fmt: skip
        for accesses in conflicts:
            for agent, (times, sources) in accesses.by_agent.items():
                bad = ordered[rows, agent] < times[offsets]
                if bad.any():
                    row, column = np.argwhere(bad)[0]
                    byte, group = int(offsets[row, column]), int(groups[row])
                    raise self._race(byte, agent, int(sources[byte]), group, source, accesses.verb)

    def _require_fenced(self, offsets: np.ndarray, group: int, source: Source) -> None:
        """Refuse an asynchronous read of generic writes that no proxy fence has ordered."""
        fenced = self.agents.fenced()[group]
        bad = fenced[self._writer[offsets]] < self._written[offsets]
        bad &= ~self._asynchronous[offsets]
        sources = self._write_source
        for agent, (times, of_atomics) in self._atomics.by_agent.items():
            if not bad.any():
                bad, sources = fenced[agent] < times[offsets], of_atomics
        if bad.any():
            byte = int(offsets.reshape(-1)[np.flatnonzero(bad)[0]])
            before = self._source(int(sources[byte]))
            raise SimulationError(
                "race",
                f"{source.op} reads byte {byte} of {self.name} by the asynchronous proxy, and no "
                f"fence.proxy.async is between it and {before.op} --> {before.loc}\n"
                f" --> {source.loc}",
            )

    def _require_one_writer(self, offsets: np.ndarray, raw: np.ndarray, source: Source) -> None:
        """Refuse a store in which two threads write different values to one byte."""
        flat, values = offsets.reshape(-1), raw.reshape(-1)
        scratch = self.bytes
        before = scratch[flat].copy()
        scratch[flat] = values
        differs = scratch[flat] != values
        scratch[flat] = before
        if differs.any():
            byte = int(flat[np.flatnonzero(differs)[0]])
            raise SimulationError(
                "race",
                f"two threads store different values to byte {byte} of {self.name} at once"
                f"\n --> {source.loc}",
            )

    def _note(
        self, accesses: _LastAccesses, offsets: np.ndarray, groups: np.ndarray, source: Source
    ) -> None:
        """Note accesses of thread groups now."""
        number = self._number(source)
        for g in np.unique(groups).tolist():
            accesses.note(g, offsets[groups == g], self.agents.order.time[g], number)

    def _end_write(self, offsets: np.ndarray, source: Source) -> None:
        """Note the source of a write, before which all earlier accesses happen."""
        self._write_source[offsets] = self._number(source)
        self._reads.clear(offsets)
        self._atomics.clear(offsets)

    def _number(self, source: Source) -> int:
        return self._sources.setdefault(source, len(self._sources))

    def _source(self, number: int) -> Source:
        return list(self._sources)[number]

    def _race(
        self, byte: int, agent: int, number: int, group: int, source: Source, verb: str
    ) -> SimulationError:
        before, agents = self._source(number), self.agents
        return SimulationError(
            "race",
            f"{source.op} at byte {byte} of {self.name} by {agents.name(group)}\nis not ordered "
            f"after {before.op} by {agents.name(agent)}, which has {verb} it --> {before.loc}\n"
            f" --> {source.loc}",
        )


def _by_byte(poison: Any, shape: tuple[int, int], itemsize: int) -> Any:
    """Return the poison of each byte of rows of values."""
    if poison is None or poison is False:
        return False
    bad = np.broadcast_to(
        np.asarray(poison).reshape(shape[0] if np.ndim(poison) else 1, -1),
        (shape[0], shape[1] // itemsize),
    )
    return np.repeat(bad, itemsize, axis=1)
