"""Plans whose copies and kernels are ordered, or refused, whatever rank makes a copy, launches the
kernel, or comes last."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

N, F32 = 16, "float32"
ROW, ROWS = T.Tensor((N,), F32), T.Tensor((2, N), F32)
PART, PARTS = W.Symmetric((N,), F32), W.Symmetric((2, N), F32)


@T.prim_func
def read_all(S: W.Symmetric((N,), F32), Y: T.Tensor((N,), F32)):
    with T.Kernel(1, threads=32) as _:
        t = T.alloc_fragment((N,), F32)
        T.copy(S[W.rank(), 0], t)
        T.copy(t, Y)


@T.prim_func
def write_all(X: T.Tensor((N,), F32), S: W.Symmetric((N,), F32)):
    with T.Kernel(2, threads=32) as b:
        t = T.alloc_fragment((N // 2,), F32)
        T.copy(X[b * (N // 2)], t)
        T.copy(t, S[W.rank(), b * (N // 2)])


@T.prim_func
def collect(S: W.Symmetric((2, N), F32), Y: T.Tensor((2, N), F32)):
    with T.Kernel(2, threads=32) as b:
        t = T.alloc_fragment((N,), F32)
        T.copy(S[W.rank(), b, 0], t)
        T.copy(t, Y[b, 0])


def inputs_of(ranks, **more):
    return [{"X": np.arange(N, dtype=np.float32) + 100 * rank, **more} for rank in range(ranks)]


def run(plan, ranks, inputs=None):
    inputs = inputs or inputs_of(ranks)
    return tw.simulate(plan, ranks, inputs, schedules=10, epochs=3, resident_blocks=64)


def refused(plan, ranks, inputs=None):
    with pytest.raises(tw.TileWeaveError) as error:
        run(plan, ranks, inputs)
    return str(error.value)


@tw.plan
def swap(p, X: ROWS, S: PARTS, Y: ROWS):
    for row in range(2):
        p.copy(S[1 - p.rank, row], X[row], stream="push")
    p.launch(collect, S, Y)


def test_peers_bring_what_might_be_the_own_share():
    inputs = [{"X": np.full((2, N), 1 + rank, np.float32)} for rank in range(2)]
    for rank, out in enumerate(run(swap, 2, inputs)):
        assert np.array_equal(out["Y"], inputs[1 - rank]["X"])


@tw.plan
def fetch(p, X: ROW, S: PART, Y: ROW):
    p.launch(write_all, X, S)
    p.copy(Y, S[(p.rank + 1) % p.world_size])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_fetch_of_what_kernels_write_in_the_launching_stream(ranks):
    inputs = inputs_of(ranks)
    for rank, out in enumerate(run(fetch, ranks, inputs)):
        assert np.array_equal(out["Y"], inputs[(rank + 1) % ranks]["X"])


@tw.plan
def fetch_first(p, X: ROW, S: PART, Y: ROW):
    p.copy(Y, S[(p.rank + 1) % p.world_size])
    p.launch(write_all, X, S)


@tw.plan
def fetch_both(p, X: ROW, S: PART, Q: PART, Y: ROW, Z: ROW):
    peer = (p.rank + 1) % p.world_size
    p.copy(Q[p.rank], X)
    p.launch(write_all, X, S)
    p.copy(Y, S[peer], stream="one")
    p.copy(Z, Q[peer], stream="two")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            fetch_first,
            "p.copy waits for write_all to bring S[1, 0:16], which comes after it in the caller's "
            "stream; expected another stream, or the kernel first",
        ),
        (
            fetch_both,
            "p.copy reads Q[0, 0:16], which no kernel writes, in a plan whose copies read from "
            "peers what a kernel writes (S); expected two plans, or flags and waits written by hand",
        ),
    ],
)
def test_refused(plan, message):
    error = refused(plan, 3)
    assert message in error and __file__ in error
