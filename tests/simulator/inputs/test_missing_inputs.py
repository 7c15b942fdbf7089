"""Reports of uninitialized memory name the parameters that have no input."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N = 32


@T.prim_func
def count_and_send(
    X: T.Tensor((N,), "int32"), S: W.Symmetric((N,), "int32"), state: T.Tensor((1,), "int32"),
    out: T.Tensor((N,), "int32"),
):  # fmt: skip
    with T.Kernel(1, threads=N) as _:
        T.copy(X, S[1 - W.rank(), 0])
        for i in T.Parallel(N):
            out[i] = S[W.rank(), i] + state[0]
        T.sync_threads()
        if T.get_thread_binding() == 0:
            state[0] = state[0] + 1


@pytest.mark.parametrize(
    ("given", "named"), [((), "X"), (("state",), "X"), (("X",), "state"), (("X", "state"), None)]
)
def test_the_report_names_what_has_no_input(given, named):
    sizes = {"X": N, "state": 1}
    inputs = [{n: np.zeros(sizes[n], np.int32) for n in given} for _ in range(2)]
    if named is None:
        tw.simulate(count_and_send, 2, inputs, epochs=1)
        return
    with pytest.raises(tw.SimulationError, match="poison") as error:
        tw.simulate(count_and_send, 2, inputs, epochs=1)
    assert f"no input for {named}; expected an array in inputs=" in error.value.report


def test_the_input_of_one_rank_does_not_suffice():
    with pytest.raises(tw.SimulationError, match="no input for X;"):
        tw.simulate(count_and_send, 2, [{"X": np.zeros(N, np.int32)}, {}], epochs=1)
