"""Which counters a program needs."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ..regions.accesses import Kind
from ..regions.coverage import Coverage
from ..regions.granules import Counter, Granules, choose_granules, counter_of
from ..regions.tensor_accesses import TensorAccesses
from .context import SyncContext, copies_with_granules


def make_counters(exchange: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Give each exchanged tensor counters: of what its reads wait for, of the clearing that
    additions wait for, of what a plan's copies take, and of everything if the program's caller
    shall find it complete.

    Args:
        scratch: tensors that only the program sees.

    Raises:
        LanguageError: an option for a tensor that is none of them, or that does not fit.
    """
    names = [t.tensor.name for t in exchange.traffic]
    unknown = [name for name in exchange.options.granule if name not in names]
    if unknown:
        raise LanguageError(
            f"tileweave.granule: {unknown[0]!r} is no tensor that ranks exchange; expected "
            f"{' or '.join(map(repr, names))}"
        )
    for traffic in exchange.traffic:
        name = traffic.tensor.name
        granules = choose_granules(traffic, exchange.options.granule.get(name))
        names = _names(traffic)
        for kind, (what, _, _) in names.items():
            if users := traffic.users_of(kind):
                _add(exchange, counter_of(traffic, kind, granules, users), f"{name}_{what}")
        for kind, (_, what, _) in names.items():
            if traffic.copies_out is not None and traffic.needs(traffic.copies_out, kind):
                _add(exchange, _of_copies_out(traffic, kind, granules), f"{name}_{what}")
        for kind, (_, _, what) in names.items():
            if not _must_be_complete(traffic, kind, traffic.tensor in scratch):
                continue
            if traffic.copies is not None:
                _await_all(exchange, traffic)
                continue
            whole = Granules(traffic.grid.shape, traffic.grid.shape)
            counter = counter_of(traffic, kind, whole, [])
            counter.at_exit = True
            _add(exchange, counter, f"{name}_{what}")


def _names(traffic: TensorAccesses) -> dict[Kind, tuple[str, str, str]]:
    """By kind of what they count, the names of counters for accesses of the kernel, for copies of
    a plan, and for the end of the launch."""
    names: dict[Kind, tuple[str, str, str]]
    names = {traffic.last_producer: ("arrived", "made", "complete")}
    if traffic.has("add"):
        names["write"] = ("cleared", "written", "settled")
    return names


def _of_copies_out(traffic: TensorAccesses, kind: Kind, granules: Granules) -> Counter:
    """The counter of what accesses of ``kind`` bring for a plan's copies to take."""
    out = traffic.copies_out
    assert out is not None
    if traffic.copies is not None:
        raise LanguageError(
            f"{out.access.text}, and {traffic.copies.access.text}, beside one kernel; expected two "
            f"tensors, or flags and waits written by hand{out.access.location}"
        )
    counter = counter_of(traffic, kind, granules, [out])
    counter.by_copies = True
    stream_of: dict[tuple, str | None] = {}
    for copy, *granule in copies_with_granules(counter, out):
        stream = stream_of.setdefault((copy.rank, *granule), copy.stream)
        if stream != copy.stream:
            raise LanguageError(
                f"{out.access.text} in streams {stream!r} and {copy.stream!r}, and the kernel "
                f"tells one of it; expected one stream{out.access.location}"
            )
    return counter


def _must_be_complete(traffic: TensorAccesses, kind: Kind, scratch: bool) -> bool:
    """Whether accesses of ``kind`` of others complete something that no read of the owner surely
    waits for, though it matters."""
    if scratch and kind == "write":
        return False
    reads = traffic.of_kind("read")
    certain = [b for b in reads if b.is_certain]
    if len(certain) == len(reads):
        return _is_left(traffic, kind, traffic.coverage["read"])
    return _is_left(traffic, kind, Coverage.by(traffic.grid, traffic.world_size, "read", certain))


def _is_left(traffic: TensorAccesses, kind: Kind, reads: Coverage) -> bool:
    """Whether accesses of ``kind`` of others complete something for an owner who does not read
    it."""
    brought = np.where(traffic.complete_after(kind), traffic.coverage[kind].ranks, 0)
    brought = brought.reshape(traffic.world_size, -1)
    read = reads.ranks.reshape(traffic.world_size, -1)
    own = 1 << np.arange(traffic.world_size)[:, None]
    return bool(np.any((brought & ~own != 0) & (read & own == 0)))


def _await_all(exchange: SyncContext, traffic: TensorAccesses) -> None:
    """Let the owner wait at the end of the launch for all that a plan's copies bring, of which its
    kernel may have waited for a part only."""
    counter = next((c for c in exchange.counters if c.traffic is traffic), None)
    every = counter is not None and np.all(counter.arrivals == 1)
    if not every or _is_left(traffic, "write", traffic.coverage["read"]):
        copies = traffic.copies.access
        raise LanguageError(
            f"{copies.text}, of which the kernel of its owner reads a part only; expected "
            f"reads of all of it, or flags and waits written by hand{copies.location}"
        )
    counter.also_at_exit = True


def _add(exchange: SyncContext, counter: Counter, name: str) -> None:
    traffic = counter.traffic
    buffers = exchange.buffers[traffic.tensor]
    total = counter.granules.total * (traffic.world_size if counter.pulled else 1)
    shape = (buffers, total) if buffers > 1 else (total,)
    counter.flags = exchange.add_hidden(name, shape, "uint32", symmetric=True)
    exchange.counters.append(counter)
