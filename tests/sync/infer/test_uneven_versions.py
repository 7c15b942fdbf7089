"""Loops that run zero times on some ranks: the statements before and after them on these ranks."""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

RANKS, N = 3, 32


@factory
def sent_left(iterations, X: T.Tensor((2, N), "int32"), Y: T.Tensor((2, N), "int32")):
    """Ranks that have a left neighbor write to it in ``iterations`` iterations."""
    with T.Kernel(1, threads=N):
        S = W.alloc_symmetric((2, N), "int32")
        me = W.rank()
        for turn in T.serial(iterations(me)):
            for i in T.Parallel(N):
                S[me - 1, turn, i] = X[turn, i]
        for turn in T.serial(iterations((me + 1) % RANKS)):
            for i in T.Parallel(N):
                Y[turn, i] = S[me, turn, i]


@pytest.mark.parametrize("reuse", ["auto", "credit", "barrier"])
@pytest.mark.parametrize(
    "iterations",
    [
        pytest.param(lambda rank: T.min(rank, 1), id="none or one"),
        pytest.param(lambda rank: T.min(rank, 1) * 2, id="none or two"),
        pytest.param(lambda rank: rank, id="none to two"),
    ],
)
def test_no_rank_signals_a_rank_out_of_bounds(iterations, reuse):
    """In its first iteration rank 0 would write to rank -1, but it runs no iteration."""
    inputs = [{"X": np.full((2, N), r, np.int32), "Y": np.zeros((2, N), np.int32)}
              for r in range(RANKS)]  # fmt: skip
    options = {"tileweave.reuse": reuse}
    out = tw.simulate(
        sent_left(iterations), RANKS, inputs, schedules=3, epochs=3, pass_configs=options
    )
    assert [o["Y"].any() for o in out] == [True, True, False]


@factory
def read_by_the_last(
    iterations, X: T.Tensor((N,), "int32"), Y: T.Tensor((3, N), "int32"), *, after=False
):
    """Rank 0 writes to the last rank, the only one whose loop runs.

    Args:
        after: whether the last rank reads after the loop, too.
    """
    with T.Kernel(1, threads=N):
        S = W.alloc_symmetric((N,), "int32")
        me = W.rank()
        if me == 0:
            for i in T.Parallel(N):
                S[RANKS - 1, i] = X[i]
        for turn in T.serial(iterations(me)):
            for i in T.Parallel(N):
                Y[turn, i] = S[me, i]
        if after and me == RANKS - 1:
            for i in T.Parallel(N):
                Y[2, i] = S[me, i]


LEFT = 1, "a load reads the result of writes; moved out of the loop over turn"


def waits_of(program):
    """Return (times per block, reason) of each wait for S."""
    return [(o.per_block, o.reason) for o in tw.explain(program, RANKS).ops
            if (o.kind, o.flag) == ("wait", "S_arrived")]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_the_wait_leaves_a_loop_that_may_run_zero_times(count):
    program = read_by_the_last(lambda rank: rank // 2 * count)
    assert waits_of(program) == [LEFT]
    inputs = [{"X": np.arange(N, dtype=np.int32)} for _ in range(RANKS)]
    out = tw.simulate(program, RANKS, inputs, schedules=3, epochs=2)
    assert np.array_equal(out[-1]["Y"][0], inputs[0]["X"])


def test_a_read_after_the_loop_has_its_own_wait():
    program = read_by_the_last(lambda rank: rank // 2 * 2, after=True)
    assert len(waits_of(program)) == 2


def test_a_loop_that_always_runs_needs_no_guard():
    """The wait in the loop covers later accesses."""

    @T.prim_func
    def program(X: T.Tensor((N,), "int32"), Y: T.Tensor((RANKS + 1, N), "int32")):
        with T.Kernel(1, threads=N):
            S = W.alloc_symmetric((N,), "int32")
            me = W.rank()
            for i in T.Parallel(N):
                S[(me + 1) % RANKS, i] = X[i]
            for turn in T.serial(me + 1):
                for i in T.Parallel(N):
                    Y[turn, i] = S[me, i]
            for i in T.Parallel(N):
                Y[RANKS, i] = S[me, i]

    assert waits_of(program) == [LEFT]
    assert "covers it, too" in str(tw.explain(program, RANKS))


def test_a_wait_stays_in_a_loop_whose_first_iteration_reads_nothing():
    """The wait leaves the inner loop only, and tests the condition there."""

    @T.prim_func
    def program(X: T.Tensor((N,), "int32"), Y: T.Tensor((3, N), "int32")):
        with T.Kernel(1, threads=N):
            S = W.alloc_symmetric((N,), "int32")
            if W.rank() == 0:
                for i in T.Parallel(N):
                    S[0, i] = X[i]
            for turn in T.serial(3):
                for _ in T.serial(T.min(turn, W.rank())):
                    for i in T.Parallel(N):
                        Y[turn, i] = S[0, i]

    text = tw.emit(program, stage="tile", world_size=RANKS)
    assert re.search(r"for turn in range\(3\):\n\s+if 0 < .*\n.*wait_reached\(.*S_arrived", text)
    inputs = [{"X": np.arange(N, dtype=np.int32)} for _ in range(RANKS)]
    out = tw.simulate(program, RANKS, inputs, schedules=3, epochs=2)
    assert all((o["Y"][1:] == inputs[0]["X"]).all() for o in out[1:])


@pytest.mark.filterwarnings("ignore:.*never waited for:tileweave.SimulationWarning")
def test_no_rank_waits_for_a_rank_that_does_not_read():
    """A rank that does not read gives no credit."""

    @T.prim_func
    def program(X: T.Tensor((N,), "int32"), Y: T.Tensor((N,), "int32")):
        with T.Kernel(1, threads=N):
            S = W.alloc_symmetric((N,), "int32")
            me = W.rank()
            for i in T.Parallel(N):
                S[(me + 1) % RANKS, i] = X[i]
            if me > 0:
                for i in T.Parallel(N):
                    Y[i] = S[me, i]

    inputs = [{"X": np.full(N, r, np.int32)} for r in range(RANKS)]
    out = tw.simulate(program, RANKS, inputs, schedules=3, epochs=3)
    assert [o["Y"][0] for o in out[1:]] == [0, 1]
