"""State of one block of a device function: shared memory, barriers, asynchronous copies."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ..machine.block import Block, Mask, MBarrier
from ..memory.clock import Clock
from ..memory.order import SETS
from ..memory.threads import WARP
from ..report.errors import SimulationError
from .async_registers import AsyncRegisters
from .shared import Agents, SharedMemory


@dataclass
class TransactionBarrier(MBarrier):
    """One mbarrier that the program initializes, and that the asynchronous proxy uses.

    Attributes:
        initialized: thread group, time and line of its initialization.
        visible: whether a fence has made the initialization visible to the asynchronous proxy.
        fenced: clock of the proxy fences of the arrivals so far.
        awaited: time of the last copy for which a thread has waited.
        deliveries, landed: numbers of ``BlockOrder.loads`` and times of copies by ``cp.async``
            before arrivals of the current phase, and of completed phases.
    """

    initialized: tuple[int, int, str] | None = None
    visible: bool = False
    fenced: Clock | None = None
    awaited: int = 0


@dataclass
class Group:
    """Asynchronous copies that a thread group issues, in groups that it commits.

    Attributes:
        open: time of the last copy since the last commit; 0 if there is none.
        committed: time of the last copy of each committed group that is in flight.
    """

    open: int = 0
    committed: list[int] = field(default_factory=list)

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = 0

    def wait(self, max_pending: int) -> int:
        """Wait until at most ``max_pending`` groups are in flight; return the complete time."""
        completed = self.committed[: max(0, len(self.committed) - max_pending)]
        del self.committed[: len(completed)]
        return max(completed, default=0)


COPIES, SOURCES, PRODUCTS = range(3)
"""Kinds of asynchronous accesses of each thread group: copies by ``cp.async``, and reads of shared
memory by bulk stores and by ``wgmma``."""


class DeviceBlock(Block):
    """Block of a device function."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.agents = Agents(self.order, self.name_of_agent)
        self.shared: dict[int, SharedMemory] = {}
        self.bulk: dict[int, Group] = defaultdict(Group)
        """Bulk and TMA stores of each thread group."""
        self.sources: dict[int, Group] = defaultdict(Group)
        """Bulk and TMA stores of each thread group, as readers of shared memory."""
        self.copies: dict[int, Group] = defaultdict(Group)
        """Copies by ``cp.async`` of each thread group."""
        self.products: dict[int, Group] = defaultdict(Group)
        """Products by ``wgmma`` of each thread group."""
        self.registers = AsyncRegisters()
        self.matrices: dict[Any, Any] = {}
        """Matrix descriptors, by the pointer to their buffer."""
        self.note_load, self.note_store = self.registers.load, self.registers.store
        layout = self.order.layout
        self._groups = layout.thread_groups
        self._first = layout.copies - self._groups - 1 - 3 * self._groups
        """Number of mbarriers."""

    def loaders(self, thread_groups: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return each thread group on its own: the others may not use the value."""
        return [(g,) for g in thread_groups]

    def causes(self, thread_groups: tuple[int, ...]) -> Clock:
        """Return the clock of all that may have led to a change by these thread groups: accesses of
        their warps, and those that a barrier orders before the change."""
        warps = set()
        for g in thread_groups:
            warps |= set((self.kernel.thread_groups[g] // WARP).tolist())
        groups = self.kernel.thread_groups
        return self.order.causal_clock(
            [g for g, threads in enumerate(groups) if warps & set((threads // WARP).tolist())]
        )

    def barrier(self, thread_groups: tuple[int, ...]) -> None:
        super().barrier(thread_groups)
        self.agents.join_fences(thread_groups)

    def show_barriers(self, thread_groups: tuple[int, ...]) -> None:
        """Make mbarriers that these groups have initialized visible to the asynchronous proxy."""
        for barrier in (b for barriers in self.barriers.values() for b in barriers):
            if barrier.initialized is not None and barrier.initialized[0] in thread_groups:
                barrier.visible = True

    def has_bulk_stores(self, thread_groups: tuple[int, ...]) -> bool:
        """Return whether a bulk store of these thread groups may be in flight."""
        kinds = self.bulk, self.sources
        groups = (kind[g] for kind in kinds for g in thread_groups if g in kind)
        return any(group.open or group.committed for group in groups)

    def commit(self, mask: Mask) -> None:
        for groups in (self.bulk, self.sources):
            for g in mask.overlapping:
                if g in groups:
                    groups[g].commit()

    def wait_groups(self, mask: Mask, left: int, read: bool) -> None:
        for g in mask.overlapping:
            if g in self.sources:
                time = self.sources[g].wait(left)
                self.order.complete_loads((g,), self.loads_of(SOURCES, g), time)
            if g in self.bulk and not read:
                self.order.complete_bulk((g,), self.bulk[g].wait(left))

    def loads_of(self, kind: int, g: int) -> int:
        """Return the number, for ``BlockOrder.loads``, of the accesses of a kind by a group."""
        return self._first + 1 + kind * self._groups + g

    def next_load(self, number: int) -> tuple[int, int]:
        """Return agent, from 0, and time of the next access of ``BlockOrder.loads(number)``."""
        agent, time, _ = self.order.load_actor((0,), number)
        return agent - self.order.base, time

    def name_of_agent(self, number: int) -> str:
        names = self.machine.memory.thread_names
        if number < self._groups:
            return f"{self.name()}, {names[number]}"
        number -= self._groups + SETS
        if number < self._groups:
            return f"{self.name()}, bulk stores of {names[number]}"
        return f"{self.name()}, asynchronous accesses"

    def require_end(self) -> None:
        """Refuse the end of the block while an asynchronous copy may still read or write its shared
        memory."""
        for barrier in (b for barriers in self.barriers.values() for b in barriers):
            if barrier.issued > barrier.awaited:
                raise SimulationError(
                    "reuse",
                    f"{self.place} ends while a load may still write its "
                    f"shared memory; expected a wait at mbarrier {barrier.name}",
                )
        for g, group in self.sources.items():
            if group.open or any(group.committed):
                names = self.machine.memory.thread_names
                raise SimulationError(
                    "reuse",
                    f"{self.place} ends while a bulk store of {names[g]} "
                    "may still read its shared memory; expected W.bulk_wait(0, read=True)",
                )
