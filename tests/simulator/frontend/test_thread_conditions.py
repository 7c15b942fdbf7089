"""Operations under a condition on the thread order memory for these threads only."""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

N = 128


@factory
def wait_under(
    reads,
    chosen,
    faulty,
    mail: W.Symmetric((N,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    picks: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
    epoch: T.int32,
):
    """Some threads wait for a message.

    Args:
        reads: "all" threads read the message, in the correct program after a barrier; or the
            "waiting" threads read their own element, in the faulty program their neighbors do.
    """
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        tx = T.get_thread_binding()
        mail[peer, tx] = 1000 * epoch + tx
        T.sync_threads()
        if tx == 0:
            W.st(flags[peer, 0], epoch + 1, sem="release", scope="sys")
        if chosen(tx, me, picks):
            while W.ld(flags[me, 0], sem="acquire", scope="sys") != epoch + 1:
                pass
        if reads == "all":
            if not faulty:
                T.sync_threads()
            out[tx] = mail[me, tx]
        elif chosen(tx - faulty, me, picks):
            out[tx] = mail[me, tx]
        W.sync_ranks()


@factory
def signal_under(
    chosen,
    faulty,
    mail: W.Symmetric((32,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    picks: T.Tensor((1,), "int32"),
    out: T.Tensor((32,), "int32"),
    epoch: T.int32,
):
    """One thread of a warp signals what the warp wrote."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        tx = T.get_thread_binding()
        if tx // 32 == 1:
            mail[peer, tx - 32] = 1000 * epoch + tx
            if not faulty:
                T.sync_warp()
            if chosen(tx - 32, me, picks):
                W.st(flags[peer, 0], epoch + 1, sem="release", scope="sys")
        while W.ld(flags[me, 0], sem="acquire", scope="sys") != epoch + 1:
            pass
        if tx < 32:
            out[tx] = mail[me, tx]
        W.sync_ranks()


CONDITIONS = {
    "remainder": lambda tx, me, picks: tx % 32 == 0,
    "quotient": lambda tx, me, picks: tx // 32 == 1,
    "rank": lambda tx, me, picks: tx == me + 5,
    "memory": lambda tx, me, picks: tx == picks[0],
    "bits": lambda tx, me, picks: (tx & 3) == 1,
    "linear": lambda tx, me, picks: tx * 2 < 64,
    "both": lambda tx, me, picks: (tx > me) & (tx < me + 3),
}
ONE_THREAD = ("rank", "memory")


def simulate(program, size=N):
    inputs = {
        "flags": np.zeros(1, np.int32),
        "picks": np.full(1, 7, np.int32),
        "out": np.full(size, -1, np.int32),
        "epoch": lambda e: e,
    }
    return tw.simulate(program, world_size=2, inputs=[dict(inputs)] * 2, schedules=10)


def require_fault(program, what, size=N):
    with pytest.raises(tw.SimulationError) as error:
        simulate(program, size)
    assert error.value.kind in ("race", "reuse"), error.value.report
    assert re.search(what, error.value.report), error.value.report


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("reads", ["all", "waiting"])
def test_a_wait_acquires_for_the_threads_that_execute_it(reads, condition):
    chosen = CONDITIONS[condition]
    require_fault(wait_under(reads, chosen, True), r"load of mail\[[01](\.\.[01])?, ")
    outputs = simulate(wait_under(reads, chosen, False))
    for rank, values in enumerate(outputs):
        tx = np.arange(N)
        on = chosen(tx, rank, np.full(1, 7)) if reads == "waiting" else tx >= 0
        np.testing.assert_array_equal(values["out"], np.where(on, 2000 + tx, -1))


@pytest.mark.parametrize("condition", ONE_THREAD)
def test_a_signal_releases_for_the_threads_that_execute_it(condition):
    chosen = CONDITIONS[condition]
    require_fault(signal_under(chosen, True), r"store of mail\[[01](\.\.[01])?, ", 32)
    for values in simulate(signal_under(chosen, False), 32):
        np.testing.assert_array_equal(values["out"], 2032 + np.arange(32))


@factory
def flag_of_each_peer(
    faulty,
    mail: W.Symmetric((4, 32), "int32"),
    flags: W.Symmetric((4,), "int32"),
    out: T.Tensor((4, 32), "int32"),
    epoch: T.int32,
):
    """Thread i waits for rank i, which is enough for its own reads."""
    with T.Kernel(1, threads=32) as _:
        me, ranks = W.rank(), W.world_size()
        tx = T.get_thread_binding()
        for peer in T.serial(ranks):
            mail[peer, me, tx] = 1000 * epoch + 100 * me + tx
        T.sync_threads()
        if tx < ranks:
            W.st(flags[tx, me], epoch + 1, sem="release", scope="sys")
            W.wait_reached(flags[me, tx], epoch + 1)
            for i in T.serial(32):
                if faulty:
                    out[tx, i] = mail[me, (tx + 1) % ranks, i]
                else:
                    out[tx, i] = mail[me, tx, i]
        W.sync_ranks()


def test_each_thread_acquires_for_itself():
    inputs = [{"flags": np.zeros(4, np.int32), "epoch": lambda e: e} for _ in range(4)]
    for values in tw.simulate(flag_of_each_peer(False), world_size=4, inputs=inputs, schedules=5):
        expected = 2000 + 100 * np.arange(4)[:, None] + np.arange(32)
        np.testing.assert_array_equal(values["out"], expected)
    with pytest.raises(tw.SimulationError, match="load of mail") as error:
        tw.simulate(flag_of_each_peer(True), world_size=4, inputs=inputs, schedules=20)
    assert error.value.kind in ("race", "reuse")


@factory
def put_by_a_warp(
    synchronized,
    src: T.Tensor((64,), "int32"),
    mail: W.Symmetric((64,), "int32"),
    flags: W.Symmetric((1,), "int32"),
    out: T.Tensor((64,), "int32"),
    epoch: T.int32,
):
    """A warp copies; its first lane signals."""
    with T.Kernel(1, threads=64) as _:
        me = W.rank()
        peer = (me + 1) % W.world_size()
        tx = T.get_thread_binding()
        if tx // 32 == 1:
            W.put_warp(src[0], mail[peer, 0], 64)
            if synchronized:
                T.sync_warp()
            if tx % 32 == 0:
                W.st(flags[peer, 0], epoch + 1, sem="release", scope="sys")
        while W.ld(flags[me, 0], sem="acquire", scope="sys") != epoch + 1:
            pass
        out[tx] = mail[me, tx]
        W.sync_ranks()


def test_a_warp_orders_its_own_threads():
    inputs = [
        {"flags": np.zeros(1, np.int32), "src": np.arange(64, dtype=np.int32),
         "epoch": lambda e: e}
    ] * 2  # fmt: skip
    for values in tw.simulate(put_by_a_warp(True), world_size=2, inputs=inputs, schedules=5):
        np.testing.assert_array_equal(values["out"], np.arange(64))
    with pytest.raises(tw.SimulationError, match="put_warp of mail"):
        tw.simulate(put_by_a_warp(False), world_size=2, inputs=inputs, schedules=5)


def test_output_is_printed_once(capsys):
    """A schedule that restarts with finer thread groups prints nothing twice."""

    @T.prim_func
    def program(flags: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=64) as _:
            tx = T.get_thread_binding()
            if tx == 0:
                T.print(flags[0], msg="value")
            if tx % 32 == 3:
                W.atom_add(flags[0], 1, sem="acq_rel", scope="gpu")

    tw.simulate(program, world_size=1, inputs=[{"flags": np.zeros(1, np.int32)}], epochs=1)
    assert capsys.readouterr().out.count("value") == 1
