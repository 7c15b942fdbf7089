"""Signals that no rank waits for are not inserted, and there is no warning about inserted ones."""

import warnings

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.corpus import PROGRAMS
from tests.factory import factory
from tileweave import language as W

N = 32


@factory
def second_row_unread(X: T.Tensor((2, N), "int32"), Y: T.Tensor((2, N), "int32")):
    with T.Kernel(1, threads=N) as _:
        S = W.alloc_symmetric((2, N), "int32")
        me = W.rank()
        T.copy(X[0, 0:N], S[1 - me, 0, 0])
        T.copy(X[1, 0:N], S[1 - me, 1, 0])
        T.copy(S[me, 0, 0:N], Y[0, 0:N])


@factory
def own_row_unread(X: T.Tensor((2, N), "int32"), Y: T.Tensor((2, N), "int32")):
    with T.Kernel(1, threads=N) as _:
        S = W.alloc_symmetric((2, N), "int32")
        me = W.rank()
        for owner in T.serial(2):
            T.copy(X[0, 0:N], S[owner, me, 0])
        for source in T.serial(2):
            if source != me:
                T.copy(S[me, source, 0:N], Y[0, 0:N])


@factory
def all_rows_read(X: T.Tensor((2, N), "int32"), Y: T.Tensor((2, N), "int32")):
    with T.Kernel(1, threads=N) as _:
        S = W.alloc_symmetric((2, N), "int32")
        me = W.rank()
        T.copy(X[0, 0:N], S[1 - me, 0, 0])
        T.copy(X[1, 0:N], S[1 - me, 1, 0])
        T.copy(S[me, 0, 0:N], Y[0, 0:N])
        T.copy(S[me, 1, 0:N], Y[1, 0:N])


@factory
def rows_read_by_the_caller(
    X: T.Tensor((2, N), "int32"), S: W.Symmetric((2, N), "int32"), Y: T.Tensor((2, N), "int32")
):
    """The last block waits for all rows, because the caller may read them."""
    with T.Kernel(1, threads=N) as _:
        me = W.rank()
        T.copy(X[0, 0:N], S[1 - me, 0, 0])
        T.copy(X[1, 0:N], S[1 - me, 1, 0])
        T.copy(S[me, 0, 0:N], Y[0, 0:N])


@pytest.mark.parametrize(
    ("make", "signals"),
    [(second_row_unread, 1), (own_row_unread, 1), (all_rows_read, 2), (rows_read_by_the_caller, 3)],
)
def test_only_what_a_rank_waits_for_is_signalled(make, signals):
    ops = tw.explain(make(), world_size=2).ops
    inserted = [op for op in ops if op.kind == "signal" and op.tensor == "S"]
    assert len(inserted) == signals
    inputs = [{"X": np.arange(2 * N, dtype=np.int32).reshape(2, N) + r} for r in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.SimulationWarning)
        outputs = tw.simulate(make(), 2, inputs, schedules=10, epochs=3)
    for rank in range(2):
        assert (outputs[rank]["Y"][0] == inputs[1 - rank]["X"][0]).all()


def test_a_rank_does_not_signal_to_itself_what_only_others_read():
    source = tw.emit(own_row_unread(), world_size=2)
    assert "if (owner != rank) {" in source.split("tw::signal<")[0]
    source = tw.emit(all_rows_read(), world_size=2)
    assert "!= rank" not in source and "rank !=" not in source


def test_data_decides_which_signals_are_read():
    case = PROGRAMS["scattered_loads"]
    inputs = case.inputs(np.random.default_rng(2), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tw.SimulationWarning)
        tw.simulate(case.make(2), 2, inputs, epochs=2, resident_blocks=case.resident)
