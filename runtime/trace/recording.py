"""``tw.trace``: record what the kernels of all ranks do on their GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...builtins.errors import TileWeaveError
from ..executor.recorded_calls import invalidate
from ..host.context import TraceBuffer, TraceEvent
from ..host.session import Session
from ..host.tracer import TracedStep, Tracer, activate, active
from ..kernel.kernel import capturing
from ..lifecycle import init
from .clocks import Clocks, Reading, combined
from .merge import EVENT, RankClock, RankRecord, TimedCall, Word, merge
from .render import writer
from .trace import Trace

EVENTS = 1 << 18
"""Default number of events for which a rank has memory; one needs 56 bytes."""
_HEAD = ctypes.sizeof(TraceBuffer)
assert ctypes.sizeof(TraceEvent) == EVENT.itemsize

_kept: list[torch.Tensor] = []
"""Buffers of traces that failed: kernels may still write to them."""


@contextmanager
def trace(path: str | Path, *, group: Any = None, events: int = EVENTS) -> Iterator[None]:
    """Record all calls of a group inside the ``with`` statement, and write one trace of all its
    ranks.

    Collective: all ranks of the group enter and leave it together. Kernels, plans and operators run
    as traced variants, which are compiled at their first call in a trace; kernels that run outside
    of it stay as they are. The results do not change; the times do, by roughly a microsecond for
    each event. At the end all ranks synchronize, and rank 0 writes the file. If the body raises an
    error, nothing is written.

    The trace contains the blocks, pipelined loops, waits, signals and transfers of kernels, the
    steps of plans, and the times at which the host enqueued them. It contains no replay of a CUDA
    graph.

    Args:
        path: file of rank 0: ``.json`` for Perfetto and ``tileweave trace``, ``.html`` a drawing.
        group: ranks whose calls are recorded: None for the default group, a ``ProcessGroup``, its
            name, or a ``DeviceMesh`` with one axis. Calls of other groups run as they are.
        events: number of events of each rank for which there is memory. Later events are counted
            and not recorded.

    Raises:
        TileWeaveError: a trace is being recorded, a CUDA graph is being captured, an argument is
            not legal, or rank 0 cannot write the file.
    """
    write = writer(path, "trace:")
    if type(events) is not int or events < 1:
        raise TileWeaveError(f"trace: events={events!r}; expected a positive integer")
    if active() is not None:
        raise TileWeaveError(f"trace: {path} inside of another trace; expected one at a time")
    if capturing():
        raise TileWeaveError(
            f"trace: {path} while a CUDA graph is captured; expected it around the calls that run"
        )
    session = init(group)
    tracer = Tracer(session)
    clocks = Clocks(session)
    first = clocks.read()
    nbytes = _HEAD + events * EVENT.itemsize
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=session.group.device)
    buffer[:_HEAD].view(torch.int64)[1] = events
    _begin(session, tracer, buffer)
    try:
        yield
    except BaseException:
        _kept.append(buffer)
        with suppress(Exception):  # after a deadlock the GPU is lost
            session.context.set_trace(0)
        raise
    else:
        session.group.synchronize()
        session.context.set_trace(0)
    finally:
        activate(None)
        invalidate()
    second = clocks.read()
    clock = combined(first.clock, second.clock)
    record = _record(session, tracer, buffer, clock, first)
    clocks.free()
    _write(session, _gathered(session, record), Path(path).stem, write)


def _begin(session: Session, tracer: Tracer, buffer: torch.Tensor) -> None:
    """Record from now on. No earlier kernel is recorded, and no recorded call is repeated."""
    session.group.synchronize()
    session.context.set_trace(buffer.data_ptr())
    session.group.synchronize()
    session.group.meet("trace: begin")
    invalidate()
    activate(tracer)


def _record(
    session: Session, tracer: Tracer, buffer: torch.Tensor, clock: RankClock, base: Reading
) -> RankRecord:
    """Return what this rank recorded."""
    count, capacity = buffer[:_HEAD].view(torch.int64).tolist()
    kept = min(count, capacity)
    raw = buffer[_HEAD : _HEAD + kept * EVENT.itemsize].cpu().numpy()
    events = raw.view(EVENT).copy()
    steps = [_timed(step, base) for step in tracer.steps]
    addresses = {int(a) for a in np.unique(events["flag"])} | {s.address for s in steps}
    return RankRecord(
        session.group.rank, events, count - kept, tracer.launches, steps,
        words_of(session, addresses), clock,
    )  # fmt: skip


def _write(
    session: Session, records: list[RankRecord], name: str, write: Callable[[Trace], None]
) -> None:
    """Write the trace of all ranks on rank 0. Collective: all ranks raise the error of rank 0."""
    failure, cause = "", None
    if records:
        try:
            write(merge(records, name))
        except Exception as error:  # the other ranks wait for the outcome
            failure, cause = str(error), error
            if not isinstance(error, TileWeaveError):
                failure = f"trace: {name}: rank 0 failed: {type(error).__name__}: {error}"
    failure = session.group.exchange("trace: written", failure)[0]
    if failure:
        raise TileWeaveError(failure) from cause


def words_of(session: Session, addresses: Iterable[int]) -> dict[int, Word]:
    """Return the words of symmetric memory at these addresses."""
    words: dict[int, Word] = {}
    for address in addresses:
        if (place := session.heap.place_of(address)) is not None:
            index = session.heap.index_of(address)
            words[address] = Word(*place, "" if index is None else str(index))
    return words


def _timed(step: TracedStep, base: Reading) -> TimedCall:
    begin, end = (
        base.base_ns + round(base.base.elapsed_time(event) * 1e6)
        for event in (step.begin, step.end)
    )
    return TimedCall(
        step.kind, step.op, step.loc, step.stream, step.tensor, step.address, step.value,
        step.nbytes, begin, end, step.host_ns,
    )  # fmt: skip


def _gathered(session: Session, record: RankRecord) -> list[RankRecord]:
    """Return the records of all ranks on rank 0, and none on the others. Collective."""
    group = session.group
    if group.process_group is None:
        return [record]
    records = [None] * group.world_size if group.rank == 0 else None
    root = dist.get_global_rank(group.process_group, 0)
    dist.gather_object(record, records, dst=root, group=group.process_group)
    return [r for r in records or () if r is not None]
