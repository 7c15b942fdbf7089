"""Nobody overwrites what another rank may still be reading in the launch before."""

from __future__ import annotations

import numpy as np
from tvm import tirx

from ....builtins.errors import LanguageError
from ..regions.accesses import Access
from ..regions.footprints import Footprints
from ..regions.granules import Counter
from ..regions.tensor_accesses import TensorAccesses
from . import builtin_calls
from .context import SyncContext
from .edits import anchor_of, loops_kept, loops_shared, moved
from .waits import dominates


def choose_buffers(exchange: SyncContext, traffic: TensorAccesses, scratch: bool) -> int:
    """How many buffers launches take in turn: two where that makes waiting unnecessary.

    Raises:
        LanguageError: two are asked for and do not suffice.
    """
    reuse = exchange.options.reuse
    if not scratch or reuse in ("barrier", "credit") or not _pairs(traffic, scratch):
        return 1
    far = _too_far(exchange, traffic)
    if far is None:
        return 2
    if reuse == "double_buffer":
        writer, reader = far
        access = traffic.of_kind("write", "add")[0].access
        raise LanguageError(
            f"{access.text}: tileweave.reuse=double_buffer does not suffice: rank {writer} writes "
            f"it for rank {reader} and does not wait for anything from that rank in the same "
            f"launch; expected auto, barrier or credit{access.location}"
        )
    return 1


def guard_reuse(exchange: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Prove that each write of a launch follows the reads of the launch before, or let it wait.

    Two buffers in turn suffice where every writer waits, in every launch, for something its readers
    write: it then begins the launch after next only when they have begun the next. A credit is a
    counter of launches that a reader has finished; what the caller reads between launches is free
    when the next launch of its rank has begun. Neither is waited for where the block has already
    waited for something that these ranks write in this launch.
    """
    for traffic in exchange.traffic:
        name = traffic.tensor.name
        own = traffic.tensor in scratch
        pairs = _pairs(traffic, own)
        if not pairs:
            exchange.reuse[name] = "each rank reads only what it writes itself"
        elif exchange.buffers[traffic.tensor] > 1:
            exchange.reuse[name] = "two buffers in turn: every writer waits for its readers' data"
        elif traffic.copies is not None:
            exchange.credits(True, pairs)
            exchange.reuse[name] = "copies wait until the readers' ranks have begun the same call"
        else:
            _guard(exchange, traffic, own)


def _guard(exchange: SyncContext, traffic: TensorAccesses, scratch: bool) -> None:
    name = traffic.tensor.name
    by_caller = not scratch or not traffic.has("read")
    started = by_caller or exchange.options.reuse == "barrier"
    done: list[tuple[str, Access, int]] = []
    guarded = False
    for footprints in traffic.of_kind("write", "add"):
        readers = _readers_of(traffic, scratch)[footprints.owner] & ~(1 << footprints.rank)
        if np.any(readers & ~_heard_from(exchange, footprints) & -footprints.mask.astype(np.int64)):
            guarded = True
            _wait(exchange, traffic, footprints, scratch, started, done)
    if not guarded:
        exchange.reuse[name] = "writers first wait for what the readers write in the same launch"
    elif started:
        exchange.reuse[name] = "writers wait until the owner's next launch has started"
    else:
        exchange.reuse[name] = "writers wait for a credit: the readers' last launch has finished"


def _wait(
    exchange: SyncContext,
    traffic: TensorAccesses,
    footprints: Footprints,
    scratch: bool,
    started: bool,
    done: list,
) -> None:
    access, symbols = footprints.access, exchange.symbols
    kept = loops_kept(access, footprints, [footprints.owner], clipped=True)
    left = access.loops[kept:]
    home = symbols.simplified(symbols.start(footprints, 0, [*left, *access.inner]), access)
    known, readers = footprints.ranks_and_owners(), _readers_of(traffic, scratch)
    only_home = all((int(readers[h]) ^ 1 << h) & ~(1 << r) == 0 for r, h in known)
    key = str(home)
    for k, other, other_kept in done:
        if key == k and dominates(other, other_kept, access, kept):
            reason = f"before {access.op} overwrites it: the wait at {other.line} serves, too"
            exchange.note("wait", access, traffic.tensor.name, reason)
            return
    done.append((key, access, kept))
    flags = exchange.credits(started, _pairs(traffic, scratch))
    one = tirx.const(1, "uint32")
    target = exchange.epoch if started else exchange.epoch - one

    def wait(peer: tirx.PrimExpr) -> tirx.Stmt:
        flag = tirx.BufferLoad(flags, [symbols.rank, peer])
        return builtin_calls.wait_reached(flag, target, peer, access)

    everyone = [int(bits) for bits in readers]
    stmt = wait(home) if only_home else exchange.for_each_rank(wait, everyone, home, known)
    if only_home and any(r == h for r, h in known):
        stmt = tirx.IfThenElse(tirx.NE(home, symbols.rank), stmt, None)
    exchange.placement.put_before(anchor_of(access, kept), stmt, access)
    what = "its launch has started" if started else "its last launch has finished"
    exchange.note(
        "wait", access, traffic.tensor.name,
        f"before {access.op} overwrites it: {'the owner' if only_home else 'its readers'} may "
        f"still read until {what}{moved(left)}",
        stmt, each="1", flag=flags.name,
    )  # fmt: skip


def _readers_of(traffic: TensorAccesses, scratch: bool) -> np.ndarray:
    """Which ranks may read the copy of each rank, a bit each: in the kernel, and, unless only the
    program sees the tensor, its owner between launches."""
    size = int(np.prod(traffic.grid.cells))
    readers = traffic.coverage["read"].ranks.reshape(traffic.world_size, size)
    by_home = np.bitwise_or.reduce(readers, axis=1)
    return by_home if scratch else by_home | 1 << np.arange(traffic.world_size)


def _heard_from(exchange: SyncContext, footprints: Footprints) -> np.ndarray:
    """From which ranks the block has data of this launch, a bit each, in every iteration of an
    access, because it has waited for it."""
    heard = np.zeros((1,) * footprints.mask.ndim, np.int64)
    for counter in exchange.counters:
        if counter.is_of_copies:
            continue
        makers = _makers(counter)
        for other in (b for b in counter.users if b.is_certain):
            shared = loops_shared(other.access, footprints.access)
            if other.access.place[shared] > footprints.access.place[shared] or not other.repeats:
                continue
            made = np.where(other.mask, makers[other.owner, counter.granules.of(other)], 0)
            once = np.bitwise_or.reduce(made, axis=tuple(range(1 + shared, made.ndim)))
            heard = heard | once.reshape(once.shape + (1,) * (footprints.mask.ndim - once.ndim))
    return heard


def _makers(counter: Counter) -> np.ndarray:
    """Which ranks bring something for each granule of each copy, a bit each."""
    world_size, total = counter.arrivals.shape
    ranks = counter.traffic.coverage[counter.kind].ranks.reshape(world_size, -1)
    out = np.zeros((world_size, total), np.int64)
    granules = counter.granules.of_cells(counter.traffic)
    for copy, makers in zip(out, ranks, strict=True):
        np.bitwise_or.at(copy, granules, makers)
    return out


def _pairs(traffic: TensorAccesses, scratch: bool) -> set[tuple[int, int]]:
    """(writer, reader): which ranks write what other ranks read."""
    readers = [int(bits) for bits in _readers_of(traffic, scratch)]
    written = set().union(*(b.ranks_and_owners() for b in traffic.of_kind("write", "add")))
    return {
        (writer, r)
        for writer, home in written
        for r in range(traffic.world_size)
        if readers[home] >> r & 1 and r != writer
    }


def _too_far(exchange: SyncContext, traffic: TensorAccesses) -> tuple[int, int] | None:
    """A writer and a reader of what it writes for which it does not wait in every launch."""
    waits_for = [0] * exchange.world_size
    for other in exchange.traffic:
        added, written = (other.coverage[kind].ranks for kind in ("add", "write"))
        made = np.where(other.complete_after("add"), added, written)
        for footprints in (b for b in other.in_kernel("read") if b.is_certain):
            rank, _, pieces = other.grid.cells_of(footprints)
            for box, cell in pieces:
                for reader in range(exchange.world_size):
                    of_reader = cell[rank[box] == reader]
                    waits_for[reader] |= int(np.bitwise_or.reduce(made[of_reader], initial=0))
    for writer, reader in sorted(_pairs(traffic, scratch=True)):
        if not waits_for[writer] >> reader & 1:
            return writer, reader
    return None
