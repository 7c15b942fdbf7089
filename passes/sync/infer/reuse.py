"""Reuse of memory: writes must not overwrite data that a previous launch may still read."""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.ir import structural_equal

from ....builtins.errors import LanguageError
from ...ir.walk import arrows, has_loads
from ..regions.accesses import Access
from ..regions.footprints import Footprints
from ..regions.granules import Counter
from ..regions.tensor_accesses import TensorAccesses
from . import builtin_calls
from .context import SyncContext
from .edits import anchor_of, enclosing_depth, loops_shared, moved_out_of
from .waits import dominates


def choose_buffers(context: SyncContext, accesses: TensorAccesses, scratch: bool) -> int:
    """Return the number of buffers that launches use in turn: two if that makes waits unnecessary.

    Raises:
        LanguageError: the user asks for two buffers and they are not sufficient.
    """
    reuse = context.options.reuse
    if not scratch or reuse in ("barrier", "credit") or not _pairs(accesses, scratch):
        return 1
    if accesses.is_limited:
        return 1  # a launch that exchanges nothing would not order the ones around it
    unordered = _unordered_pair(context, accesses)
    if unordered is None:
        return 2
    if reuse == "double_buffer":
        writer, reader = unordered
        access = accesses.of_kind("write", "add")[0].access
        raise LanguageError(
            f"{access.text}: tileweave.reuse=double_buffer is not sufficient: rank {writer} writes "
            f"it for rank {reader} and does not wait for anything from that rank in the same "
            f"launch; expected auto, barrier or credit{access.location}"
        )
    return 1


def guard_reuse(context: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Prove that each write of a launch follows the reads of the previous launch, or insert a wait.

    - Two buffers in turn are sufficient if every writer waits in every launch for data of its
      readers: it then begins the launch after next only when they have begun the next launch.
    - A credit counts the launches that a reader has finished.
    - Data that the caller reads between launches may be overwritten when the next launch of its
      rank has started.

    No wait is inserted if the block has already waited for data that these ranks write in this
    launch.
    """
    for accesses in context.tensor_accesses:
        name = accesses.tensor.name
        is_scratch = accesses.tensor in scratch
        pairs = _pairs(accesses, is_scratch)
        if not pairs:
            context.reuse[name] = "each rank reads only what it writes itself"
        elif context.buffers[accesses.tensor] > 1:
            context.reuse[name] = "two buffers in turn: every writer waits for its readers' data"
        elif accesses.copies is not None:
            context.credits(True, pairs)
            context.reuse[name] = "copies wait until the readers' ranks have begun the same call"
        else:
            _guard(context, accesses, is_scratch)


def _guard(context: SyncContext, accesses: TensorAccesses, scratch: bool) -> None:
    name = accesses.tensor.name
    by_caller = not scratch or not accesses.has("read")
    started = by_caller or context.options.reuse == "barrier"
    placed: list[tuple[tirx.PrimExpr, Access, int]] = []
    guarded = False
    for footprints in accesses.of_kind("write", "add"):
        readers = _readers_of(accesses, scratch)[footprints.owner] & ~(1 << footprints.rank)
        not_awaited = readers & ~_awaited_ranks(context, footprints)
        if np.any(not_awaited & -footprints.mask.astype(np.int64)):
            guarded = True
            _wait(context, accesses, footprints, scratch, started, placed)
    if not guarded:
        context.reuse[name] = "writers first wait for what the readers write in the same launch"
    elif started:
        context.reuse[name] = "writers wait until the owner's next launch has started"
    else:
        context.reuse[name] = "writers wait for a credit: the readers' last launch has finished"


def _wait(
    context: SyncContext,
    accesses: TensorAccesses,
    footprints: Footprints,
    scratch: bool,
    started: bool,
    placed: list,
) -> None:
    access, symbols = footprints.access, context.symbols
    depth = len(access.loops)
    if not footprints.runtime_axes:  # else data chooses the owner, at the access
        depth = enclosing_depth(access, footprints, [footprints.owner], clipped=True)
    exited = access.loops[depth:]
    owner = symbols.inserted(symbols.box_start(footprints, 0, [*exited, *access.inner]), access)
    pairs, readers = footprints.ranks_and_owners(), _readers_of(accesses, scratch)
    only_owner = all(
        (int(readers[owner]) ^ 1 << owner) & ~(1 << rank) == 0 for rank, owner in pairs
    )
    for other_owner, other, other_depth in placed:
        if structural_equal(owner, other_owner) and dominates(other, other_depth, access, depth):
            reason = f"before {access.op} overwrites it: the wait at {other.line} covers it, too"
            context.record("wait", access, accesses.tensor.name, reason)
            return
    if not footprints.outside and not has_loads(owner):
        placed.append((owner, access, depth))
    flags = context.credits(started, _pairs(accesses, scratch))
    one = tirx.const(1, "uint32")
    target = context.epoch if started else context.epoch - one

    def wait(peer: tirx.PrimExpr) -> tirx.Stmt:
        flag = tirx.BufferLoad(flags, [symbols.rank_call, peer])
        return builtin_calls.wait_reached(flag, target, peer, access)

    masks = [int(bits) for bits in readers]
    stmt = wait(owner) if only_owner else context.for_each_rank(wait, masks, owner, pairs)
    if only_owner and any(rank == owner for rank, owner in pairs):
        stmt = tirx.IfThenElse(tirx.NE(owner, symbols.rank_call), stmt, None)
    stmt = context.guard(stmt, footprints, exited)
    context.placement.put_before(anchor_of(access, depth), stmt, access)
    event = "its launch has started" if started else "its last launch has finished"
    context.record(
        "wait", access, accesses.tensor.name,
        f"before {access.op} overwrites it: {'the owner' if only_owner else 'its readers'} may "
        f"still read until {event}{moved_out_of(exited)}",
        stmt, amount="1", flag=flags.name,
    )  # fmt: skip


def _readers_of(accesses: TensorAccesses, scratch: bool) -> np.ndarray:
    """Return the ranks that may read the copy of each rank, as a bit mask: the ranks that read it
    in the kernel and, unless ``scratch``, its owner, whose caller may read it between launches."""
    size = int(np.prod(accesses.grid.cells))
    readers = accesses.coverage["read"].ranks.reshape(accesses.world_size, size)
    by_owner = np.bitwise_or.reduce(readers, axis=1)
    return by_owner if scratch else by_owner | 1 << np.arange(accesses.world_size)


def _awaited_ranks(context: SyncContext, footprints: Footprints) -> np.ndarray:
    """Return the ranks for whose data of this launch the block has waited, as a bit mask, in each
    iteration of an access."""
    awaited = np.zeros((1,) * footprints.mask.ndim, np.int64)
    for counter in context.signalled_counters:  # a poll waits for its own thread only
        if counter.is_of_copies:
            continue
        producers = _producers(counter)
        for other in (f for f in counter.users if f.is_certain or _encloses(f, footprints)):
            shared = loops_shared(other.access, footprints.access)
            is_later = other.access.positions[shared] > footprints.access.positions[shared]
            if is_later or not other.repeats:
                continue
            granules = counter.granules.numbers_of(other)
            ranks = other.extended(np.where(other.mask, producers[other.owner, granules], 0))
            ranks = np.bitwise_or.reduce(ranks, axis=tuple(range(1 + shared, ranks.ndim)))
            missing_axes = (1,) * (footprints.mask.ndim - ranks.ndim)
            awaited = awaited | ranks.reshape(ranks.shape + missing_axes)
    return footprints.taken(awaited)


def _encloses(read: Footprints, write: Footprints) -> bool:
    """Return whether a read that depends on a limit happens whenever the block reaches a write."""
    branches = read.access.conditions[: read.access.branches]
    conditions = write.access.conditions[: len(branches)]
    return (
        read.limit is not None
        and len(conditions) == len(branches)
        and all(a.same_as(b) for a, b in zip(branches, conditions, strict=True))
    )


def _producers(counter: Counter) -> np.ndarray:
    """Return the ranks that write data for each granule of each copy, as a bit mask."""
    world_size, total = counter.arrivals.shape
    ranks = counter.accesses.coverage[counter.kind].ranks.reshape(world_size, -1)
    out = np.zeros((world_size, total), np.int64)
    granules = counter.granules.numbers_of_cells(counter.accesses)
    for copy, producers in zip(out, ranks, strict=True):
        np.bitwise_or.at(copy, granules, producers)
    return out


def _pairs(accesses: TensorAccesses, scratch: bool) -> set[tuple[int, int]]:
    """Return the (writer, reader) pairs of different ranks: the reader reads what the writer
    writes."""
    readers = [int(bits) for bits in _readers_of(accesses, scratch)]
    written = set().union(*(f.ranks_and_owners() for f in accesses.of_kind("write", "add")))
    return {
        (writer, r)
        for writer, owner in written
        for r in range(accesses.world_size)
        if readers[owner] >> r & 1 and r != writer
    }


def _unordered_pair(context: SyncContext, accesses: TensorAccesses) -> tuple[int, int] | None:
    """Return a (writer, reader) pair in which the writer does not wait for the reader's data in
    every launch; None if there is no such pair."""
    waits_for = [0] * context.world_size
    for other in context.tensor_accesses:
        if context.is_ll(other.tensor) and not context.is_ll(accesses.tensor):
            continue  # polls order no other memory
        added, written = (other.coverage[kind].ranks for kind in ("add", "write"))
        producers = np.where(other.complete_after("add"), added, written)
        for footprints in (f for f in other.in_kernel("read") if f.is_certain):
            rank, _, pieces = other.grid.cells_of(footprints)
            for box, cell in pieces:
                for reader in range(context.world_size):
                    of_reader = cell[rank[box] == reader]
                    waits_for[reader] |= int(np.bitwise_or.reduce(producers[of_reader], initial=0))
    for writer, reader in sorted(_pairs(accesses, scratch=True)):
        if not waits_for[writer] >> reader & 1:
            return writer, reader
    return None


def clear_limited(context: SyncContext, scratch: set[tirx.Buffer]) -> None:
    """Verify accesses that depend on a limit, and clear their counters at the end of a launch.

    All accesses to a granule happen for the same values of the limit. So its counter receives in a
    launch either all units, for which its readers wait, or none. Writers of the next launch wait
    for a credit, which the last block signals after it has cleared the counters.

    Args:
        scratch: tensors that only the program accesses.

    Raises:
        LanguageError: some accesses to a granule depend on another limit than others.

    After:  ``for g in T.serial(n): S_arrived[me, g] = 0`` in the last block
    """
    for counter in context.signalled_counters:
        accesses = counter.accesses
        if not accesses.is_limited:
            continue
        first = next(f for f in accesses.in_kernel("write") if f.limit is not None)
        if accesses.tensor not in scratch:
            raise first.refused(
                "depends on W.rank_uniform, and the caller accesses the tensor", "W.alloc_symmetric"
            )
        _verify_limit(counter, first)
        assert counter.flags is not None
        number = tirx.Var("granule", "int32")
        indices = [context.symbols.rank_call, number]
        clear = tirx.BufferStore(counter.flags, tirx.const(0, "uint32"), indices)
        total = counter.flags.shape[-1]
        context.at_end.append(tirx.For(number, 0, total, tirx.ForKind.SERIAL, clear))


def _verify_limit(counter: Counter, first: Footprints) -> None:
    """Refuse accesses to a granule that do not all happen for the same values of the limit."""
    shape = counter.accesses.world_size, counter.granules.total
    low, high = np.full(shape, np.iinfo(np.int64).max), np.full(shape, -1)
    assert first.limit is not None
    for footprints in [*counter.accesses.in_kernel(counter.kind), *counter.users]:
        limit = footprints.limit
        if limit is None or not structural_equal(limit.value, first.limit.value):
            raise _other_limit(first, footprints)
        numbers = counter.granules.numbers_of(footprints)
        owner, number, index = footprints.distinct(footprints.owner, numbers, footprints.limited)
        np.minimum.at(low, (owner, number), index)
        np.maximum.at(high, (owner, number), index)
        if np.any(low[owner, number] != high[owner, number]):
            raise _other_limit(first, footprints)


def _other_limit(first: Footprints, other: Footprints) -> LanguageError:
    accesses = [first.access, other.access]
    return LanguageError(
        f"{accesses[0].text} under a condition on W.rank_uniform, and {accesses[1].text} under "
        "another condition, or a granule contains elements of several; expected one condition "
        "index < W.rank_uniform(...) for all accesses to a granule, in an if around each"
        f"{arrows((a.kind, a.line) for a in accesses)}"
    )
