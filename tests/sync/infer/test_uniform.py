"""Accesses under a condition on a number that is loaded and equal on all ranks."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

ROWS, N = 3, 16


def rows_to_all(ranks=2, write="row < valid", read="row < valid", symmetric="scratch"):
    """Return a program in which each rank sends its valid rows to all ranks, which add them.

    Args:
        write, read: conditions of the writes and of the reads, by name.
        symmetric: ``scratch``, or ``caller`` for a parameter.
    """
    conditions = {
        "row < valid": lambda row, n: row < W.rank_uniform(n[0]),
        "valid > row": lambda row, n: W.rank_uniform(n[0]) > row,
        "row + 1 < valid": lambda row, n: row + 1 < W.rank_uniform(n[0]),
        "row <= valid": lambda row, n: row <= W.rank_uniform(n[0]),
        "row < loaded": lambda row, n: row < n[0],
        "always": lambda row, n: row >= 0,
    }
    sends, reads = conditions[write], conditions[read]
    given = W.Symmetric((ROWS, ranks, N), "float32") if symmetric == "caller" else None

    @T.prim_func
    def program(
        X: T.Tensor((ROWS, N), "float32"),
        n: T.Tensor((1,), "int32"),
        G: given,
        Y: T.Tensor((ROWS, N), "float32"),
    ):
        with T.Kernel(2 * ROWS, threads=16) as block:
            S = W.alloc_symmetric((ROWS, ranks, N), "float32") if given is None else G
            total = T.alloc_fragment((N,), "float32")
            row = block % ROWS
            if block < ROWS:
                if sends(row, n):  # writes
                    for step in T.serial(ranks):
                        to = (W.rank() + 1 + step) % ranks
                        T.copy(X[row, 0:N], S[to, row, W.rank(), 0:N])
            else:
                if reads(row, n):  # reads
                    T.clear(total)
                    for rank in T.serial(ranks):
                        for i in T.Parallel(N):
                            total[i] += S[W.rank(), row, rank, i]
                    T.copy(total, Y[row, 0:N])

    return program


def inputs_of(ranks, *numbers):
    rng = np.random.default_rng(ranks)
    return [
        {"X": rng.integers(0, 9, (ROWS, N)).astype(np.float32), "n": np.array([n], np.int32)}
        for _, n in zip(range(ranks), numbers * ranks, strict=False)
    ]


@pytest.mark.parametrize(
    ("write", "read"), [("row < valid", "row < valid"), ("row < valid", "valid > row")]
)
@pytest.mark.parametrize("valid", [1, 3])
def test_values(write, read, valid):
    inputs = inputs_of(2, valid)
    total = sum(given["X"] for given in inputs)
    for result in tw.simulate(rows_to_all(2, write, read), 2, inputs, schedules=3, epochs=3):
        np.testing.assert_array_equal(result["Y"][:valid], total[:valid])


@pytest.mark.parametrize(
    ("write", "read", "message"),
    [
        ("row < valid", "always", "under another condition"),
        ("row < valid", "row + 1 < valid", "under another condition"),
        ("row < valid", "row < loaded", "under another condition"),
        ("row <= valid", "row <= valid", "which is known only at run time"),
        ("row < loaded", "row < valid", "which is known only at run time"),
    ],
)
def test_refused(write, read, message):
    with pytest.raises(tw.LanguageError, match=message) as error:
        tw.emit(rows_to_all(2, write, read), stage="tile", world_size=2)
    assert "test_uniform.py:" in str(error.value)


def test_the_caller_must_not_access_the_tensor():
    with pytest.raises(tw.LanguageError, match=r"the caller accesses.*expected W.alloc_symmetric"):
        tw.emit(rows_to_all(symmetric="caller"), stage="tile", world_size=2)


def test_different_numbers_are_reported():
    with pytest.raises(tw.SimulationError) as error:
        tw.simulate(rows_to_all(), 2, inputs_of(2, 1, 2), schedules=1, epochs=1)
    assert error.value.kind == "assertion"
    assert "W.rank_uniform has the value" in error.value.report
    assert "; expected equal values\n --> " in error.value.report
    assert "test_uniform.py:" in error.value.report
