"""One shift to the right neighbor, ordered by ``W.signal`` and ``W.wait_reached``.

The barrier at the end makes the next epoch safe: only what happens within an epoch can go wrong.
"""

from typing import Any

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import N, case, datum, with_fault


def shift(
    early=False,
    signallers=8,
    to=1,
    signal_words={},  # noqa: B006
    waits=True,
    flag=0,
    advance=1,
    ahead=1,
    wait_words={},  # noqa: B006
):
    @T.prim_func
    def program(
        mail: W.Symmetric((N,), "int32"),
        flags: W.Symmetric((2,), "int32"),
        state: T.Tensor((1,), "int32"),
        out: T.Tensor((N,), "int32"),
    ):
        with T.Kernel(1, threads=N) as _:
            me = W.rank()
            peer = (me + 1) % W.world_size()
            epoch = T.alloc_var("int32")
            epoch = state[0]
            if early:
                W.signal(flags[peer, 0])
            for i in T.Parallel(N):
                mail[peer, i] = datum(epoch, me, i)  # FAULT data
            if not early:
                if me < signallers:
                    W.signal(flags[(me + to) % W.world_size(), 0], **signal_words)  # FAULT signal
            if waits:
                W.wait_reached(flags[me, flag], epoch * advance + ahead, **wait_words)  # FAULT wait
            for i in T.Parallel(N):
                out[i] = mail[me, i]  # FAULT data
            W.sync_ranks()
            if T.get_thread_binding() == 0:
                state[0] = epoch + 1

    return program


with_fault(shift, "flag_before_data", "race", "mail", "data", early=True)
with_fault(shift, "relaxed_signal", "race", "mail", "data", signal_words={"sem": "relaxed"})
with_fault(shift, "relaxed_wait", "race", "mail", "data", wait_words={"sem": "relaxed"})
with_fault(shift, "gpu_scope_signal", "race", "flags", "signal|wait", signal_words={"scope": "gpu"})
with_fault(shift, "cta_scope_signal", "race", "flags", "signal|wait", signal_words={"scope": "cta"})
with_fault(shift, "gpu_scope_wait", "race", "flags", "signal|wait", wait_words={"scope": "gpu"})
with_fault(shift, "no_wait", "race", "mail", "data", waits=False)
with_fault(shift, "no_signal", "deadlock", "flags", "wait", signallers=0)
with_fault(shift, "signal_in_one_branch", "deadlock", "flags", "wait", signallers=1)
with_fault(shift, "signal_to_oneself", "race", "mail", "data", to=0)
with_fault(shift, "signal_to_the_wrong_rank", "race", "mail", "data", ranks=3, to=2)
with_fault(shift, "wait_for_the_wrong_flag", "deadlock", "flags", "wait", flag=1)
with_fault(shift, "count_too_high", "deadlock", "flags", "wait", ahead=2)
with_fault(shift, "count_off_by_an_epoch", "race", "mail", "data", ahead=0)
with_fault(shift, "epoch_not_advanced", "race", "mail", "data", advance=0)


@case("race", "mail")
def wait_by_one_thread(
    faulty,
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """One thread waits; the other threads read before a block barrier."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
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
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@case("race", "mail")
def load_before_the_wait(
    faulty,
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """The tile is loaded before the wait."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        tile = T.alloc_shared((N,), "int32")
        epoch = T.alloc_var("int32")
        epoch = state[0]
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
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@case("arrival race", "flags|mail")
def every_thread_signals(
    faulty,
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """A signal under a condition on the thread index: each thread that reaches it signals."""
    signallers = 2 if faulty else 1
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
        for i in T.Parallel(N):
            mail[peer, i] = datum(epoch, me, i)
        if T.get_thread_binding() < signallers:
            W.signal(flags[peer, 0])  # FAULT
        W.wait_reached(flags[me, 0], epoch + 1)
        for i in T.Parallel(N):
            out[i] = mail[me, i]
        W.sync_ranks()
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


@case("deadlock", "flags")
def circular_waits(
    faulty,
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """Each rank waits for its neighbor before it sends."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        epoch = T.alloc_var("int32")
        epoch = state[0]
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
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1


def from_rank_0_at_2(epoch: int, me: int, ranks: int) -> dict[str, Any]:
    return {"out": datum(epoch, 0, np.arange(N)) if me == 2 else np.zeros(N)}


@case("race", "mail", from_rank_0_at_2, ranks=3)
def relaxed_relay(
    faulty,
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):
    """Rank 0 writes at rank 2 and signals rank 1, which signals rank 2 with a relaxed wait."""
    sem = "relaxed" if faulty else "acquire"
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        epoch = T.alloc_var("int32")
        epoch = state[0]
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
        if T.get_thread_binding() == 0:
            state[0] = epoch + 1
