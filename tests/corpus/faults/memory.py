"""Atomics, memory that was never written, and accesses out of bounds."""

from typing import Any

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import TILE, Flag, Mail, N, Row, State, advance, begin, case, datum


@case("race", "state", lambda epoch, me, ranks: {"out": datum(epoch, 0, np.arange(N))}, ranks=1)
def epoch_advanced_under_the_readers(faulty, state: State, out: Row):
    """One thread advances the epoch while others may not have read it yet."""
    with T.Kernel(1, threads=N) as _:
        epoch = T.alloc_var("int32")
        epoch = state[0]  # FAULT
        for i in T.Parallel(N):
            out[i] = datum(epoch, W.rank(), i)
        if not faulty:
            T.sync_threads()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1  # FAULT


def twice_an_epoch_at_rank_0(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"count": [(epoch + 1) * 2 if me == 0 else 0]}


@case("race", "count", twice_an_epoch_at_rank_0)
def plain_and_atomic_increments(faulty, count: Flag):
    """A plain store loses what an atomic adds at the same time."""
    with T.Kernel(1, threads=N) as _:
        if T.get_thread_binding() == 0:
            if W.rank() == 0:
                if faulty:
                    count[0, 0] = count[0, 0] + 1  # FAULT
                else:
                    W.red_add(count[0, 0], 1, scope="sys")
            else:
                W.red_add(count[0, 0], 1, scope="sys")  # FAULT
        W.sync_ranks()


@case("race", "count", twice_an_epoch_at_rank_0)
def gpu_scope_atomics_across_ranks(faulty, count: Flag):
    """Atomics of two GPUs are atomic to each other only at sys scope."""
    scope = "gpu" if faulty else "sys"
    with T.Kernel(1, threads=N) as _:
        if T.get_thread_binding() == 0:
            W.red_add(count[0, 0], 1, scope=scope)  # FAULT
        W.sync_ranks()


@case("poison", "mail|out", lambda e, me, n: {"out": np.arange(N)}, ranks=1, start={"mail": None})
def slot_never_written(faulty, mail: Mail, out: Row):
    """Memory that was never written reaches an output."""
    with T.Kernel(1, threads=N) as _:
        if not faulty:
            for i in T.Parallel(N):
                mail[W.rank(), i] = i
        for i in T.Parallel(N):
            out[i] = mail[W.rank(), i]  # FAULT


@case("poison", "mail|out", start={"mail": None})
def tail_not_written(faulty, mail: Mail, state: State, out: Row):
    """Full tiles are sent, the tail is not, and the reader reads both."""
    sent = N // TILE * TILE if faulty else N
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        for i in T.Parallel(sent):
            mail[(me + 1) % W.world_size(), i] = datum(epoch, me, i)
        W.sync_ranks()
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("bounds", r"mail\[2, ")
def neighbor_of_the_last_rank(faulty, mail: Mail, state: State, out: Row):
    """The last rank writes to the rank after it, which does not exist."""
    ring = 3 if faulty else 2
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        for i in T.Parallel(N):
            mail[(me + 1) % ring, i] = datum(epoch, me, i)  # FAULT
        W.sync_ranks()
        for i in T.Parallel(N):
            out[i] = mail[me, i]
        W.sync_ranks()
        advance(state, epoch)
