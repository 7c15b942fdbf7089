"""Counters of a program: choose them and allocate their memory."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ...ir.ragged import ARRIVED
from ..regions.accesses import Kind
from ..regions.coverage import Coverage
from ..regions.granules import Counter, Granules, choose_granules, counter_of, tiles_of_rows
from ..regions.tensor_accesses import TensorAccesses
from .context import SyncContext, copies_with_granules


def make_counters(context: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Give each exchanged tensor its counters. Up to four kinds of operations wait for counters:

    - reads of the kernel wait for the writes or additions,
    - additions wait for the writes that clear the tensor,
    - copies of a plan wait for the kernel's accesses,
    - the end of the launch waits for all data that the caller expects to be complete.

    Args:
        scratch: tensors that only the program accesses.

    Raises:
        LanguageError: ``tileweave.granule`` names another tensor, or its sizes do not fit.
    """
    names = [t.tensor.name for t in context.tensor_accesses if not t.announces]
    unknown = [name for name in context.options.granule if name not in names]
    if unknown:
        raise LanguageError(
            f"tileweave.granule: {unknown[0]!r} is no tensor that ranks exchange; expected "
            f"{' or '.join(map(repr, names))}"
        )
    for accesses in context.tensor_accesses:
        name = accesses.tensor.name
        if accesses.is_ragged:
            granules = tiles_of_rows(accesses)
        else:
            granules = choose_granules(accesses, context.options.granule.get(name))
        names = _names(accesses)
        for kind, (suffix, _, _) in names.items():
            if users := accesses.users_of(kind):
                _add(context, counter_of(accesses, kind, granules, users), f"{name}_{suffix}")
        for kind, (_, suffix, _) in names.items():
            if accesses.copies_out is not None and accesses.needs(accesses.copies_out, kind):
                _add(context, _of_copies_out(accesses, kind, granules), f"{name}_{suffix}")
        for kind, (_, _, suffix) in names.items():
            if not _must_be_complete(accesses, kind, accesses.tensor in scratch):
                continue
            if accesses.copies is not None:
                _drain_copies(context, accesses)
                continue
            whole_tensor = Granules(accesses.grid.shape, accesses.grid.shape)
            counter = counter_of(accesses, kind, whole_tensor, [])
            counter.at_exit = True
            _add(context, counter, f"{name}_{suffix}")


def _names(accesses: TensorAccesses) -> dict[Kind, tuple[str, str, str]]:
    """Return the suffixes of counter names, by the kind of access that they count: for waits of
    the kernel, for waits of a plan's copies, and for the end of the launch."""
    names: dict[Kind, tuple[str, str, str]]
    names = {accesses.last_producer: (ARRIVED, "made", "complete")}
    if accesses.announces:
        names["write"] = ("posted", "", "")
    if accesses.has("add"):
        names["write"] = ("cleared", "written", "settled")
    return names


def _of_copies_out(accesses: TensorAccesses, kind: Kind, granules: Granules) -> Counter:
    """Return the counter of accesses of ``kind`` whose data a plan's copies read."""
    out = accesses.copies_out
    assert out is not None
    if accesses.copies is not None:
        raise LanguageError(
            f"{out.access.text}, and {accesses.copies.access.text}, beside one kernel; expected "
            f"two tensors, or explicit flags and waits{out.access.location}"
        )
    counter = counter_of(accesses, kind, granules, [out])
    counter.by_copies = True
    stream_of: dict[tuple, str | None] = {}
    for copy, *granule in copies_with_granules(counter, out):
        stream = stream_of.setdefault((copy.rank, *granule), copy.stream)
        if stream != copy.stream:
            raise LanguageError(
                f"{out.access.text} in streams {stream!r} and {copy.stream!r}, and the kernel "
                f"signals to one of them; expected one stream{out.access.location}"
            )
    return counter


def _must_be_complete(accesses: TensorAccesses, kind: Kind, scratch: bool) -> bool:
    """Return whether other ranks complete data by accesses of ``kind`` that no read of the owner is
    certain to wait for. Plain writes of ``scratch`` tensors do not count."""
    if scratch and kind == "write":
        return False
    reads = accesses.of_kind("read")
    certain = [f for f in reads if f.is_certain]
    if len(certain) == len(reads):
        return _has_unread(accesses, kind, accesses.coverage["read"])
    coverage = Coverage.of_accesses(accesses.grid, accesses.world_size, "read", certain)
    return _has_unread(accesses, kind, coverage)


def _has_unread(accesses: TensorAccesses, kind: Kind, reads: Coverage) -> bool:
    """Return whether other ranks complete data by accesses of ``kind`` that ``reads`` of its owner
    do not cover."""
    producers = np.where(accesses.complete_after(kind), accesses.coverage[kind].ranks, 0)
    producers = producers.reshape(accesses.world_size, -1)
    read = reads.ranks.reshape(accesses.world_size, -1)
    own_bit = 1 << np.arange(accesses.world_size)[:, None]
    return bool(np.any((producers & ~own_bit != 0) & (read & own_bit == 0)))


def _drain_copies(context: SyncContext, accesses: TensorAccesses) -> None:
    """Make the owner wait at the end of the launch for all data that a plan's copies write. The
    reads of its kernel may wait for only a part of it."""
    counter = next((c for c in context.counters if c.accesses is accesses), None)
    is_counted = counter is not None and np.all(counter.arrivals == 1)
    if not is_counted or _has_unread(accesses, "write", accesses.coverage["read"]):
        copies = accesses.copies.access
        raise LanguageError(
            f"{copies.text}, of which the kernel of its owner reads only a part; expected "
            f"reads of all of it, or explicit flags and waits{copies.location}"
        )
    counter.also_at_exit = True


def _add(context: SyncContext, counter: Counter, name: str) -> None:
    accesses = counter.accesses
    if context.is_ll(accesses.tensor):
        context.counters.append(counter)
        return
    # Announced totals grow from launch to launch, so the buffers share a counter.
    buffers = 1 if accesses.is_ragged else context.buffers[accesses.tensor]
    total = counter.granules.total * (accesses.world_size if counter.pulled else 1)
    shape = (buffers, total) if buffers > 1 else (total,)
    counter.flags = context.add_implicit(name, shape, "uint32", symmetric=True)
    context.counters.append(counter)
