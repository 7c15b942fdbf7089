"""Parameters of a program with the names of parameters that the compiler adds."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.modules import load_module
from tileweave import language as W

RANKS, N = 2, 4
TEXT = """\
import tilelang.language as T
from tileweave import language as W


@T.prim_func
def program(
    {scalar}: T.int32, X: T.Tensor((4,), "int32"), {tensor}: W.Symmetric((4,), "int32"),
    Y: T.Tensor((4,), "int32"),
):
    with T.Kernel(1, threads=32):
        for j in T.Parallel(4):
            {tensor}[(W.rank() + 1) % W.world_size(), j] = X[j] + {scalar}
        for j in T.Parallel(4):
            Y[j] = {tensor}[W.rank(), j] * {scalar}
"""


def inputs():
    return [{"X": np.arange(N, dtype=np.int32) + 100 * rank} for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("scalar", "tensor"),
    [
        ("rank", "S"),
        ("tileweave_context", "rank"),
        ("launches", "started"),
        pytest.param("S_arrived", "S", marks=pytest.mark.long),
        pytest.param("tileweave_launch", "launches", marks=pytest.mark.long),
        pytest.param("started", "world_size", marks=pytest.mark.long),
    ],
)
def test_names_of_implicit_parameters(scalar, tensor, tmp_path):
    path = tmp_path / "named.py"
    path.write_text(TEXT.format(scalar=scalar, tensor=tensor))
    values = [{**i, scalar: 7} for i in inputs()]
    out = tw.validate(load_module(path).program, RANKS, values)
    for rank in range(RANKS):
        np.testing.assert_array_equal(out[rank]["Y"], (values[1 - rank]["X"] + 7) * 7)


def test_macro_that_allocates_is_called_twice():
    @T.macro
    def from_a_neighbor(X, Y, number):
        S = W.alloc_symmetric((N,), "int32")
        for j in T.Parallel(N):
            S[(W.rank() + 1) % RANKS, j] = X[j] + number
        for j in T.Parallel(N):
            Y[number, j] = S[W.rank(), j]

    @T.prim_func
    def program(X: T.Tensor((N,), "int32"), Y: T.Tensor((2, N), "int32")):
        with T.Kernel(1, threads=32):
            from_a_neighbor(X, Y, 0)
            from_a_neighbor(X, Y, 1)

    out = tw.simulate(program, RANKS, inputs())
    for rank in range(RANKS):
        x = inputs()[1 - rank]["X"]
        np.testing.assert_array_equal(out[rank]["Y"], [x, x + 1])


def test_memory_of_ragged_tensors():
    @T.macro
    def sent_to_all(X, Y):
        inbox = W.alloc_ragged((), rows=1, row=N, dtype="int32")
        for peer in T.serial(RANKS):
            W.announce(inbox[peer, W.rank(), 0, 0], 1)
            for j in T.Parallel(N):
                inbox[peer, W.rank(), 0, j] = X[j]
        for source in T.serial(RANKS):
            for i in T.serial(W.announced(inbox[W.rank(), source, 0, 0])):
                for j in T.Parallel(N):
                    Y[source, j] = inbox[W.rank(), source, i, j]

    @T.prim_func
    def program(
        X: T.Tensor((N,), "int32"),
        inbox_total: T.Tensor((RANKS, N), "int32"),
        inbox_announced: T.Tensor((RANKS, N), "int32"),
    ):
        with T.Kernel(1, threads=32):
            sent_to_all(X, inbox_total)
            sent_to_all(X, inbox_announced)

    expected = [i["X"] for i in inputs()]
    for tensors in tw.simulate(program, RANKS, inputs()):
        np.testing.assert_array_equal(tensors["inbox_total"], expected)
        np.testing.assert_array_equal(tensors["inbox_announced"], expected)


def test_versions():
    @T.prim_func
    def program(
        X: T.Tensor((N,), "int32"),
        S: W.Symmetric((N,), "int32"),
        S_versions: T.Tensor((2, N), "int32"),
    ):
        with T.Kernel(1, threads=32):
            for step in T.serial(2):
                for j in T.Parallel(N):
                    S[(W.rank() + 1) % RANKS, j] = X[j] + step
                for j in T.Parallel(N):
                    S_versions[step, j] = S[W.rank(), j]

    out = tw.simulate(program, RANKS, inputs())
    for rank in range(RANKS):
        x = inputs()[1 - rank]["X"]
        np.testing.assert_array_equal(out[rank]["S_versions"], [x, x + 1])
