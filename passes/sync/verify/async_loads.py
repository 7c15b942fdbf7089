"""Asynchronous loads to shared memory, which read until the program waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx
from tvm.ir import structural_equal

from ....builtins.spec import builtin_of
from ...ir.accesses import accesses_of
from ...ir.pipelined_loops import COPIES, is_pipelined
from ...ir.walk import MBARRIER_WAIT, calls_in, op_name, variables_in

if TYPE_CHECKING:
    from .events import Event


@dataclass(frozen=True, eq=False)
class _Load:
    """A load in flight.

    Attributes:
        events: its reads of symmetric tensors.
        barrier: mbarrier that the load completes on; None for T.async_copy.
        tile: destination in shared memory, if the first use of the tile waits for the load.
    """

    events: tuple[Event, ...]
    barrier: tirx.BufferLoad | None = None
    tile: tirx.Var | None = None


class AsyncLoads:
    """Loads that may be in flight at each statement of a program, in the order of statements.

    ``W.bulk_load`` and ``T.tma_copy`` end at the wait for their mbarrier, ``T.async_copy`` at
    ``T.ptx_wait_group``, and ``T.copy`` in T.Pipelined, which TileLang makes asynchronous, at the
    first use of its tile.
    """

    def __init__(self) -> None:
        self._in_flight: list[_Load] = []
        self._loops: list[tirx.For] = []

    @contextmanager
    def within(self, loop: tirx.For) -> Iterator[None]:
        """Visit the body of ``loop`` inside this context."""
        self._loops.append(loop)
        yield
        self._loops.pop()

    def begin(self, stmt: tirx.Stmt, reads: Sequence[Event]) -> None:
        """Record the loads that ``stmt`` starts; ``reads`` are its reads."""
        if not reads:
            return
        for call in calls_in(stmt, lambda c: True):
            load = self._load(call, tuple(reads))
            if load is not None:
                self._in_flight.append(load)

    def ended_by(self, stmt: tirx.Stmt) -> Iterator[tuple[Event, str]]:
        """Yield each read whose load ``stmt`` waits for, and the name of the wait."""
        if not self._in_flight:
            return
        for call in calls_in(stmt, lambda c: True):
            name = op_name(call)
            if name == MBARRIER_WAIT:
                completed = [
                    load for load in self._in_flight if self._is_for(call.args[0], load.barrier)
                ]
                yield from self._end(completed, "T.mbarrier_wait_parity")
            elif name == "tirx.ptx_wait_group":
                copies = [
                    load for load in self._in_flight if load.barrier is None and load.tile is None
                ]
                num_pending = int(call.args[0])
                yield from self._end(copies[: len(copies) - num_pending], "T.ptx_wait_group")
        used = accesses_of(stmt)
        accessed = used.reads | used.writes
        of_tiles = [load for load in self._in_flight if load.tile in accessed]
        yield from self._end(of_tiles, "the first use of what it loads")

    def _end(self, loads: list[_Load], wait_name: str) -> Iterator[tuple[Event, str]]:
        self._in_flight = [load for load in self._in_flight if load not in loads]
        yield from ((event, wait_name) for load in loads for event in load.events)

    def _load(self, call: tirx.Call, reads: tuple[Event, ...]) -> _Load | None:
        name = op_name(call)
        spec = builtin_of(call)
        if spec is not None and spec.is_async_load:
            return _Load(reads, spec.operand(call, "barrier").args[0])
        if name not in COPIES:
            return None
        target = call.args[1].args[0].buffer
        if not target.scope().startswith("shared"):
            return None
        barrier = dict(call.annotations.items()).get("barrier") if call.annotations else None
        if barrier is not None:
            return _Load(reads, barrier)
        if name == "tl.tileop.async_copy":
            return _Load(reads)
        pipelined = any(is_pipelined(loop) for loop in self._loops)
        return _Load(reads, tile=target.data) if pipelined else None

    def _is_for(self, waited: tirx.PrimExpr, barrier: tirx.BufferLoad | None) -> bool:
        """Return whether a wait may be for this mbarrier.

        An index of ``barrier`` that uses the variable of a finished loop may have any value.
        """
        if barrier is None or not isinstance(waited, tirx.BufferLoad):
            return False
        if not barrier.buffer.data.same_as(waited.buffer.data):
            return False
        loops = {loop.loop_var for loop in self._loops}
        pairs = zip(barrier.indices, waited.indices, strict=True)
        return all(
            structural_equal(a, b) or not loops.issuperset(variables_in(a)) for a, b in pairs
        )
