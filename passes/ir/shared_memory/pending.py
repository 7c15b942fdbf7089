"""Accesses of shared memory that are not yet ordered before those of all other threads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import arith, tirx

from .effects import LOAD, Access, Barrier, Use, commute
from .footprints import Footprint
from .phases import Slots
from .values import WARP, warps_of, whole_warps_of


@dataclass(frozen=True, eq=False)
class Pending:
    """An access, and the threads that know that it has happened.

    Attributes:
        access: the access; a named barrier is one by the threads that pass it.
        footprint: the bytes of shared memory, or None.
        place: path of the statement in the function.
        warps: bits of the warps that make it.
        some: for each warp that makes it, bits of the warps with a thread that knows.
        all: like ``some``, for the warps whose threads all know.
        ended: whether it has ended in the threads that made it; false for asynchronous ones.
        groups: number of groups that these threads closed since.
        published: mbarriers with an arrival of a thread that knows.
        statement: number of the executed statement.
        guards: mbarriers that threads wait for before they issue a bulk load.
        released: bits of the warps that know of the load, and have arrived at one of these since.
        alone: threads that know of it, in warps of which others may not.
    """

    access: Access | Use | Barrier
    footprint: Footprint | None
    place: Any
    warps: int
    some: np.ndarray
    all: np.ndarray
    ended: bool
    barrier: frozenset[Any] = frozenset()
    groups: int = 0
    published: frozenset[Any] = frozenset()
    statement: int = 0
    guards: Slots = frozenset()
    released: int = 0
    alone: frozenset[int] = frozenset()


def new(
    access: Access | Use | Barrier, footprint: Footprint | None, place: Any, warps: int, count: int,
    barrier: frozenset[Any] = frozenset(), statement: int = 0,
) -> Pending:  # fmt: skip
    """Return an access that only the threads that make it know of."""
    known = np.zeros(count, np.uint32)
    some = known.copy()
    ended = not access.end
    if ended:
        some[:] = np.uint32(1) << np.arange(count, dtype=np.uint32)
    makers = frozenset() if footprint is None or not ended else footprint.makers
    return Pending(
        access, footprint, place, warps, some, known, ended, barrier, statement=statement,
        alone=makers if len(makers) == 1 else frozenset(),
    )  # fmt: skip


def after_barrier(pending: Pending, warps: int) -> Pending:
    """Return the access after a barrier of all threads of these warps."""
    bits = np.uint32(warps)
    reached = (pending.some & bits) != 0
    if not reached.any():
        return pending
    more = np.where(reached, bits, np.uint32(0))
    return replace(pending, some=pending.some | more, all=pending.all | more)


def after_sync_warp(pending: Pending, warps: int) -> Pending:
    """Return the access after a barrier of each of these warps."""
    more = pending.some & np.uint32(warps)
    return replace(pending, all=pending.all | more)


def after_end(pending: Pending, threads: np.ndarray) -> Pending:
    """Return an asynchronous access after threads have waited for it."""
    warps, whole = warps_of(threads), whole_warps_of(threads)
    some, more = pending.some | np.uint32(warps), pending.all | np.uint32(whole)
    alone = pending.alone
    if warps != whole:
        alone |= {n for n in np.flatnonzero(threads).tolist() if not whole >> n // WARP & 1}
    return replace(
        pending, some=some, all=more, ended=True, released=pending.released & ~warps, alone=alone
    )


def repeated(pending: Pending, warps: int) -> Pending:
    """Return a load whose next execution may be in flight, as these warps have not waited for it
    since they released its memory."""
    unaware = np.uint32(~warps & 0xFFFFFFFF)
    return replace(
        pending, some=pending.some & unaware, all=pending.all & unaware, ended=False,
        alone=frozenset(),
    )  # fmt: skip


def join(a: Pending, b: Pending) -> Pending:
    """Return the access after either of two paths."""
    return replace(
        a, some=a.some & b.some, all=a.all & b.all, ended=a.ended and b.ended,
        groups=min(a.groups, b.groups), published=a.published & b.published,
        released=a.released | b.released, alone=a.alone & b.alone,
    )  # fmt: skip


def rows_of(pending: Pending, warps: int) -> np.ndarray:
    """Return the rows of ``some`` and ``all`` for these warps, given as bits."""
    return _rows(warps, len(pending.all))


@lru_cache(maxsize=1024)
def _rows(warps: int, count: int) -> np.ndarray:
    return np.flatnonzero((warps >> np.arange(count)) & 1)


def is_known(pending: Pending, all_warps: int) -> bool:
    """Return whether all threads know of the access, which therefore needs no barrier."""
    return bool((pending.all[rows_of(pending, pending.warps)] == all_warps).all())


def conflicts(
    pending: Pending, access: Access, footprint: Footprint, barrier: frozenset[Any]
) -> bool:
    """Return whether ``access`` needs a barrier after the pending one.

    The loads of a pipeline that complete on one mbarrier are ordered by its protocol. Loads for the
    two cases of a branch exclude each other.

    Args:
        barrier: mbarriers that ``access`` may complete on.
    """
    before = pending.access
    if commute(before, access):
        return False
    if before.end == access.end == LOAD:
        if pending.barrier & barrier or _exclude(before.condition, access.condition):
            return False
    pairs = pending.footprint.overlap(footprint, not pending.ended)
    unaware = [_unaware_warps(pending, makers) & warps for makers, warps in pairs]
    return any(unaware) and not footprint.makers <= pending.alone


def _exclude(a: tirx.PrimExpr | None, b: tirx.PrimExpr | None) -> bool:
    """Return whether two conditions never hold together."""
    if a is None or b is None:
        return False
    return arith.Analyzer().can_prove(tirx.Not(tirx.And(a, b)))


def _unaware_warps(pending: Pending, makers: int) -> int:
    """Return bits of the warps with a thread that may not know accesses of warps ``makers``."""
    known = pending.all[rows_of(pending, makers)]
    return int(~np.bitwise_and.reduce(known) & np.uint32(0xFFFFFFFF))
