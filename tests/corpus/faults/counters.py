"""Many ranks signal one counter, or all ranks signal all."""

from typing import Any

import numpy as np
import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import Flag, N, Row, State, advance, begin, case, datum, nothing, with_fault


def sum_at_rank_0(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    senders = range(1, ranks)
    total = sum(datum(epoch, sender, np.arange(N)) for sender in senders)
    return {"out": total if me == 0 else np.zeros(N)}


@factory
def many_to_one(
    board: W.Symmetric((3, N), "int32"),
    flags: Flag,
    state: State,
    out: Row,
    *,
    missing=0,
    stride=1,
    op="add",
):
    """All ranks send to their slots at rank 0, which waits for one counter."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        if me > 0:
            for i in T.Parallel(N):
                board[0, me * stride, i] = datum(epoch, me, i)  # FAULT write
            W.signal(flags[0, 0], 1, op=op)
        else:
            W.wait_reached(flags[0, 0], epoch * 2 + 2 - missing)  # FAULT wait
            for i in T.Parallel(N):
                out[i] = board[0, 1, i] + board[0, 2, i]  # FAULT read
        W.sync_ranks()
        advance(state, epoch)


to_rank_0 = {"ranks": 3, "expected": sum_at_rank_0}
with_fault(many_to_one, "count_too_low", "race", "board", "write|read", **to_rank_0, missing=1)
with_fault(many_to_one, "two_writers_of_one_slot", "race", "board", "write", **to_rank_0, stride=0)
with_fault(
    many_to_one, "set_where_add_is_meant", "deadlock", "flags", "wait", **to_rank_0, op="set"
)


@case("race", "flags", nothing)
def plain_store_to_a_polled_flag(faulty, flags: Flag, state: State):
    """A plain store to a flag races with threads that poll it, despite a later release."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        if T.get_thread_binding() == 0:
            if faulty:
                flags[peer, 0] = epoch  # FAULT
            else:
                W.st(flags[peer, 0], epoch, scope="sys")
        W.signal(flags[peer, 0], epoch + 1, op="set")
        W.wait_ge(flags[me, 0], epoch + 1)  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("arrival", "passed by 1: it has 1 too many and never returns to this value", nothing, ranks=3)
def counter_passes_the_awaited_value(faulty, flags: Flag, state: State):
    """`wait_eq` on a counter of two arrivals: both may come between two polls."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        if me > 0:
            W.signal(flags[0, 0])
        elif faulty:
            W.wait_eq(flags[0, 0], epoch * 2 + 1)  # FAULT
        else:
            W.wait_reached(flags[0, 0], epoch * 2 + 2)
        W.sync_ranks()
        advance(state, epoch)


@factory
def twice_counted(flags: Flag, state: State, *, extra=0, own=False):
    """All ranks signal rank 0, then reach a barrier; no data depends on the counter."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        for _ in T.serial(1 + extra):
            if own or me > 0:
                W.signal(flags[0, 0])  # FAULT
        if me == 0:
            W.wait_reached(flags[0, 0], epoch * 2 + 2)  # FAULT
        W.sync_ranks()
        advance(state, epoch)


at_rank_0 = {"ranks": 3, "expected": nothing}
with_fault(twice_counted, "duplicate_arrival", "arrival", "over", "", **at_rank_0, extra=1)
with_fault(twice_counted, "own_arrival_not_counted", "arrival", "over", "", **at_rank_0, own=True)


@case("deadlock", "1 missing", nothing, ranks=3)
def increment_in_two_steps(faulty, flags: Flag, state: State):
    """Load, add, store: one of two arrivals may be lost."""
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        if me > 0:
            if T.get_thread_binding() == 0:
                if faulty:
                    seen = W.ld(flags[0, 0], scope="sys", sem="relaxed")
                    W.st(flags[0, 0], seen + 1, scope="sys")
                else:
                    W.red_add(flags[0, 0], 1, scope="sys")
        else:
            W.wait_reached(flags[0, 0], epoch * 2 + 2)  # FAULT
        W.sync_ranks()
        advance(state, epoch)


def sum_of_all(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": sum(datum(epoch, r, np.arange(N)) for r in range(ranks))}


@case("race", "board", sum_of_all, ranks=3)
def rank_missing_in_the_barrier(
    faulty,
    board: W.Symmetric((3, N), "int32"),
    flags: W.Symmetric((3,), "int32"),
    state: State,
    out: Row,
):
    """All ranks signal all ranks, but no rank waits for the last one."""
    heard = 2 if faulty else 3
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        for peer in T.serial(3):
            for i in T.Parallel(N):
                board[peer, me, i] = datum(epoch, me, i)  # FAULT
            W.signal(flags[peer, me])
        for other in T.serial(heard):
            W.wait_reached(flags[me, other], epoch + 1, other)
        for i in T.Parallel(N):
            out[i] = board[me, 0, i] + board[me, 1, i] + board[me, 2, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("deadlock", "sync_ranks", nothing)
def barrier_of_one_rank(faulty, out: Row):
    """A barrier that not every rank reaches."""
    reaching = 1 if faulty else 2
    with T.Kernel(1, threads=N) as _:
        if W.rank() < reaching:
            W.sync_ranks()  # FAULT
        for i in T.Parallel(N):
            out[i] = i
