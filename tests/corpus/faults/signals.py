"""One shift to the right neighbor, ordered by ``W.signal`` and ``W.wait_reached``.

The barrier at the end makes the next epoch safe: only what happens within an epoch can go wrong.
"""

from typing import Any

import numpy as np
import tilelang.language as T

from tests.factory import factory
from tileweave import language as W

from .case import Flag, Mail, N, Row, State, advance, begin, case, datum, with_fault


@factory
def shift(
    mail: Mail, flags: W.Symmetric((2,), "int32"), state: State, out: Row, *, early=False,
    signallers=8, to=1, sem="release", scope="sys", waits=True, flag=0, counted=1, ahead=1,
    wait_sem="acquire", wait_scope="sys",
):  # fmt: skip
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        if early:
            W.signal(flags[peer, 0])
        for i in T.Parallel(N):
            mail[peer, i] = datum(epoch, me, i)  # FAULT data
        if not early:
            if me < signallers:
                W.signal(flags[(me + to) % W.world_size(), 0], sem=sem, scope=scope)  # FAULT signal
        if waits:
            last = epoch * counted + ahead
            W.wait_reached(flags[me, flag], last, sem=wait_sem, scope=wait_scope)  # FAULT wait
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT data
        W.sync_ranks()
        advance(state, epoch)


with_fault(shift, "flag_before_data", "race", "mail", "data", early=True)
with_fault(shift, "relaxed_signal", "race", "mail", "data", sem="relaxed")
with_fault(shift, "relaxed_wait", "race", "mail", "data", wait_sem="relaxed")
with_fault(shift, "gpu_scope_signal", "race", "flags", "signal|wait", scope="gpu")
with_fault(shift, "cta_scope_signal", "race", "flags", "signal|wait", scope="cta")
with_fault(shift, "gpu_scope_wait", "race", "flags", "signal|wait", wait_scope="gpu")
with_fault(shift, "no_wait", "race", "mail", "data", waits=False)
with_fault(shift, "no_signal", "deadlock", "flags", "wait", signallers=0)
with_fault(shift, "signal_in_one_branch", "deadlock", "flags", "wait", signallers=1)
with_fault(shift, "signal_to_oneself", "race", "mail", "data", to=0)
with_fault(shift, "signal_to_the_wrong_rank", "race", "mail", "data", ranks=3, to=2)
with_fault(shift, "wait_for_the_wrong_flag", "deadlock", "flags", "wait", flag=1)
with_fault(shift, "count_too_high", "deadlock", "flags", "wait", ahead=2)
with_fault(shift, "count_off_by_an_epoch", "race", "mail", "data", ahead=0)
with_fault(shift, "epoch_not_advanced", "race", "mail", "data", counted=0)


@case("race", "mail")
def wait_by_one_thread(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """One thread waits; the other threads read before a block barrier."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        for i in T.Parallel(N):
            mail[peer, i] = datum(epoch, me, i)  # FAULT
        W.signal(flags[peer, 0])
        if T.get_thread_binding() == 0:
            W.wait_reached(flags[me, 0], epoch + 1)
        if not faulty:
            T.sync_threads()
        for i in T.Parallel(N):
            out[i] = mail[me, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)


@case("race", "mail")
def load_before_the_wait(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """The tile is loaded before the wait."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        tile = T.alloc_shared((N,), "int32")
        for i in T.Parallel(N):
            tile[i] = datum(epoch, me, i)
        T.copy(tile, mail[peer, 0])  # FAULT
        W.signal(flags[peer, 0])
        if not faulty:
            W.wait_reached(flags[me, 0], epoch + 1)
        T.copy(mail[me, 0], tile)  # FAULT
        if faulty:
            W.wait_reached(flags[me, 0], epoch + 1)
        T.copy(tile, out[0])
        W.sync_ranks()
        advance(state, epoch)


@case("arrival race", "flags|mail")
def every_thread_signals(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """A signal under a condition on the thread index: each thread that reaches it signals."""
    signallers = 2 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        for i in T.Parallel(N):
            mail[peer, i] = datum(epoch, me, i)
        if T.get_thread_binding() < signallers:
            W.signal(flags[peer, 0])  # FAULT
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]
        W.sync_ranks()
        advance(state, epoch)


@case("deadlock", "flags")
def circular_waits(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """Each rank waits for its neighbor before it sends."""
    with T.Kernel(1, threads=N) as _:
        me, peer, epoch = begin(state)
        if faulty:
            W.wait_reached(flags[me, 0], epoch + 1)  # FAULT
        for i in T.Parallel(N):
            mail[peer, i] = datum(epoch, me, i)
        W.signal(flags[peer, 0])
        if not faulty:
            W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]
        W.sync_ranks()
        advance(state, epoch)


def from_rank_0_at_2(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": datum(epoch, 0, np.arange(N)) if me == 2 else np.zeros(N)}


@case("race", "mail", from_rank_0_at_2, ranks=3)
def relaxed_relay(faulty, mail: Mail, flags: Flag, state: State, out: Row):
    """Rank 0 writes at rank 2 and signals rank 1, which signals rank 2 with a relaxed wait."""
    sem = "relaxed" if faulty else "acquire"
    with T.Kernel(1, threads=N) as _:
        me, _, epoch = begin(state)
        if me == 0:
            for i in T.Parallel(N):
                mail[2, i] = datum(epoch, me, i)  # FAULT
            W.signal(flags[1, 0])
        if me == 1:
            W.wait_reached(flags[1, 0], epoch + 1, sem=sem)
            W.signal(flags[2, 0])
        if me == 2:
            W.wait_reached(flags[2, 0], epoch + 1)
            for i in T.Parallel(N):
                out[i] = mail[2, i]  # FAULT
        W.sync_ranks()
        advance(state, epoch)
