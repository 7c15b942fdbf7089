"""Conditions that skip iterations of parallel loops: the counters see which elements are written
and where."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.releases import names_line
from tileweave import language as W

ROWS, N, F32 = 20, 16, "float32"


@factory
def passed_on(
    write, X: T.Tensor((ROWS, N), F32), S: W.Symmetric((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)
):
    """Each block writes some rows at the right neighbor, then reads the same rows of its own."""
    with T.Kernel(3, threads=32) as block:
        write(X, S, block)
        for i, j in T.Parallel(8, N):
            if block * 8 + i < ROWS:
                Y[block * 8 + i, j] = S[W.rank(), block * 8 + i, j]


@T.macro
def tail(X, S, block):
    for i, j in T.Parallel(8, N):
        if block * 8 + i < ROWS:
            S[(W.rank() + 1) % W.world_size(), block * 8 + i, j] = X[block * 8 + i, j]


@T.macro
def behind_the_first(X, S, block):
    for i, j in T.Parallel(16, N):
        if i >= 8 and block * 8 + i - 8 < ROWS:
            row = block * 8 + i - 8
            S[(W.rank() + 1) % W.world_size(), row, j] = X[row, j]


@T.macro
def from_the_last(X, S, block):
    for i, j in T.Parallel(4, N):
        for half in T.serial(2):
            row = block * 8 + half * 4 + 3 - i
            if row < ROWS:
                S[(W.rank() + 1) % W.world_size(), row, j] = X[row, j]


@T.macro
def zero_iterations(X, S, block):
    """A loop, a nested loop, or a parallel loop that runs zero iterations."""
    tail(X, S, block)
    for _ in T.serial(0):
        tail(X, S, block)
    for step in T.serial(4):
        for _ in T.serial(T.max(step - 3, 0)):
            T.copy(X[block * 8, 0], S[(W.rank() + 1) % W.world_size(), block * 8, 0])
    for i, j in T.Parallel(0, N):
        X[i, j] = S[W.rank(), i, j]


@pytest.mark.parametrize("write", [tail, behind_the_first, from_the_last, zero_iterations])
@pytest.mark.parametrize("ranks", [2, 3])
def test_right(write, ranks):
    rng = np.random.default_rng(ranks)
    inputs = [{"X": rng.standard_normal((ROWS, N), np.float32)} for _ in range(ranks)]
    actual = tw.simulate(passed_on(write), ranks, inputs, schedules=3, epochs=3)
    for rank in range(ranks):
        np.testing.assert_array_equal(actual[rank]["Y"], inputs[rank - 1]["X"])


def beyond_the_end(rows):
    """The last block writes and reads nothing."""

    @T.prim_func
    def program(
        X: T.Tensor((ROWS, N), F32), S: W.Symmetric((rows, N), F32), Y: T.Tensor((ROWS, N), F32)
    ):
        with T.Kernel(4, threads=32) as block:
            for i, j in T.Parallel(8, N):
                row = block * 8 + 7 - i
                if row < ROWS:
                    S[(W.rank() + 1) % 2, row, j] = X[row, j]
            for i, j in T.Parallel(8, N):
                if block * 8 + i < ROWS:
                    Y[block * 8 + i, j] = S[W.rank(), block * 8 + i, j]

    return program


@pytest.mark.parametrize("rows", [ROWS, ROWS + 4, ROWS + 5, 2 * ROWS])
def test_blocks_that_do_nothing(rows):
    """The tensor may have more rows than are written."""
    inputs = [{"X": np.full((ROWS, N), rank + 1, np.float32)} for rank in range(2)]
    actual = tw.simulate(beyond_the_end(rows), 2, inputs, schedules=3, epochs=3)
    for rank in range(2):
        np.testing.assert_array_equal(actual[rank]["Y"], inputs[1 - rank]["X"])


@T.macro
def rows_at(X, S, block, first, end):
    for i, j in T.Parallel(8, N):
        if i >= first and i < end and block * 8 + i < ROWS:
            S[(W.rank() + 1) % W.world_size(), block * 8 + i, j] = X[block * 8 + i, j]


@T.macro
def differently_many(X, S, block):
    rows_at(X, S, block, 0, block + 1)
    rows_at(X, S, block, block + 1, 8)


@T.macro
def later_each_time(X, S, block):
    rows_at(X, S, block, block, 8)
    rows_at(X, S, block, 0, block)


@T.macro
def none_or_two(X, S, block):
    tail(X, S, 1)
    for i, j in T.Parallel(8, N):
        if i // 2 == block * 2:
            S[(W.rank() + 1) % W.world_size(), block * 16 + i, j] = X[i, j]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (differently_many, "touches 1 to 3 elements along an axis; expected an equal number each"),
        (
            none_or_two,
            "skips all iterations of a loop where its conditions",
        ),
        (later_each_time, "skips first iterations of a loop, and their number varies; expected"),
    ],
)
def test_refused(write, message):
    with pytest.raises(tw.LanguageError) as error:
        tw.explain(passed_on(write), 2)
    assert message in str(error.value)
    assert names_line(str(error.value), "test_conditions.py:")
