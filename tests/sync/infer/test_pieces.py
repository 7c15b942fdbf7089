"""Tiles that are written piece by piece, the last ones beyond the end: the signals and their
amounts."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

ROWS, F32, TILE, PIECE = 8, "float32", 16, 4
PIECES = TILE // PIECE


def passed_on(write, N):
    """Each block writes a tile at the right neighbor, then reads its own."""

    @T.prim_func
    def program(
        X: T.Tensor((ROWS, N), F32), S: W.Symmetric((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)
    ):
        with T.Kernel(-(-N // TILE), threads=32) as block:
            write(X, S, block * TILE)
            for i, j in T.Parallel(ROWS, TILE):
                if block * TILE + j < N:
                    Y[i, block * TILE + j] = S[W.rank(), i, block * TILE + j]

    return program


@T.macro
def copied(X, S, i, j, height):
    piece = T.alloc_shared((height, PIECE), F32)
    T.copy(X[i, j], piece)
    T.copy(piece, S[(W.rank() + 1) % W.world_size(), i, j])


@T.macro
def one_after_the_other(X, S, n):
    for piece in T.serial(PIECES):
        copied(X, S, 0, n + piece * PIECE, ROWS)


@T.macro
def from_another_number_on(X, S, n):
    for piece in T.unroll(PIECE, TILE + PIECE, PIECE):
        copied(X, S, 0, n + piece - PIECE, ROWS)


@T.macro
def for_each_half(X, S, n):
    """Both halves have the same number of rows."""
    for half in T.serial(2):
        for piece in T.serial(PIECES):
            copied(X, S, half * (ROWS // 2), n + piece * PIECE, ROWS // 2)


@T.macro
def backwards(X, S, n):
    for piece in T.serial(PIECES):
        copied(X, S, 0, n + (PIECES - 1 - piece) * PIECE, ROWS)


@T.macro
def every_other(X, S, n):
    for first in T.serial(2):
        for piece in T.serial(PIECES // 2):
            copied(X, S, 0, n + (2 * piece + first) * PIECE, ROWS)


@T.macro
def in_steps_of_halves(X, S, n):
    for half in T.serial(2):
        for piece in T.serial(PIECES // 2):
            copied(X, S, 0, n + (half * (PIECES // 2) + piece) * PIECE, ROWS)


ONCE = [one_after_the_other, from_another_number_on, for_each_half]
PIECE_BY_PIECE = [backwards, every_other]
TAILS = [32, 34, 36, 40, 47]


def signals_of(write, N):
    ops = tw.explain(passed_on(write, N), 2).ops
    return [op for op in ops if op.kind == "signal" and op.tensor == "S"]


@pytest.mark.parametrize("write", [*ONCE, in_steps_of_halves, *PIECE_BY_PIECE])
@pytest.mark.parametrize("N", TAILS)
def test_right(write, N):
    ranks, rng = 3, np.random.default_rng(N)  # of two ranks, both neighbors are the same
    inputs = [{"X": rng.standard_normal((ROWS, N), np.float32)} for _ in range(ranks)]
    actual = tw.simulate(passed_on(write, N), ranks, inputs, schedules=2, epochs=3)
    for rank in range(ranks):
        np.testing.assert_array_equal(actual[rank]["Y"], inputs[rank - 1]["X"])


@pytest.mark.parametrize("write", ONCE)
@pytest.mark.parametrize("N", TAILS)
def test_signalled_once(write, N):
    (signal,) = signals_of(write, N)
    assert "moved out of the loop" in signal.reason
    assert signal.granule == f"{ROWS} x {TILE}"


@pytest.mark.parametrize("write", PIECE_BY_PIECE)
def test_signalled_piece_by_piece(write):
    """Iterations that write nothing come first, or some leave holes."""
    for N in (36, 40):
        (signal,) = signals_of(write, N)
        assert "moved out of the loop" not in signal.reason


def test_signalled_by_halves():
    """Iterations of two loops differ; those of the inner loop write consecutive pieces."""
    (signal,) = signals_of(in_steps_of_halves, 40)
    assert signal.reason.endswith("moved out of the loop over piece")
