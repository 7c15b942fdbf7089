"""Data-dependent reads: waits for indices, loops and conditions that are data."""

import numpy as np
import pytest
import tilelang.language as T
from tilelang import tvm

import tileweave as tw
from tests.factory import factory
from tileweave import language as W
from tileweave import passes
from tileweave.emit import EMIT_HEAP_STRIDE

pytestmark = pytest.mark.filterwarnings("ignore:.*never waited for:tileweave.SimulationWarning")

RANKS, PLACES, ROWS, N, F32 = 2, 3, 8, 4, "float32"
INDICES = T.Tensor((16,), "int32")
FOUND = T.Tensor((ROWS, N), F32)


@factory
def reading(
    read,
    at: INDICES,
    X: T.Tensor((PLACES, ROWS, N), F32),
    S: W.Symmetric((PLACES, ROWS, N), F32),
    Y: FOUND,
):
    """Return a program that writes all rows of its right neighbor's S, then runs ``read``.

    ``read`` is a macro of the indices, S, tiles of one and of four rows, and Y.
    """
    with T.Kernel(1, threads=32):
        row = T.alloc_shared((1, N), F32)
        rows = T.alloc_shared((4, N), F32)
        for place in T.serial(PLACES):
            for r in T.serial(ROWS):
                T.copy(X[place, r, 0], row)
                T.copy(row, S[(W.rank() + 1) % RANKS, place, r, 0])
        read(at, S, row, rows, Y)


def waits_of(program):
    """Return (granule, times per block) of each wait for S."""
    ops = tw.explain(program, RANKS).ops
    return [(op.granule, op.per_block) for op in ops if (op.kind, op.flag) == ("wait", "S_arrived")]


def text_of(program):
    mod = tvm.IRModule({"program": program})
    return passes.run_group(mod, RANKS, EMIT_HEAP_STRIDE).script()


def runs(program, expected):
    """Simulate some schedules; ``expected`` computes Y from indices and the left
    neighbor's data."""
    rng = np.random.default_rng(0)
    inputs = [
        {
            "at": rng.integers(0, PLACES, 16).astype(np.int32),
            "X": rng.integers(-8, 8, (PLACES, ROWS, N)).astype(np.float32),
            "Y": np.zeros((ROWS, N), np.float32),
        }
        for _ in range(RANKS)
    ]
    out = tw.simulate(program, RANKS, inputs, schedules=4, epochs=2)
    for rank, given in enumerate(inputs):
        left = inputs[(rank + 1) % RANKS]["X"]
        assert np.array_equal(out[rank]["Y"], expected(given["at"], left))


def test_one_wait_for_the_place_that_a_variable_names():
    @T.macro
    def read(at, S, row, rows, Y):
        place = at[0]
        for r in T.serial(ROWS):
            T.copy(S[W.rank(), place, r, 0], row)
            T.copy(row, Y[r, 0])

    program = reading(read)
    assert waits_of(program) == [("1 x 1 x 4", ROWS)]
    runs(program, lambda at, X: X[at[0]])


def test_tiles_that_begin_anywhere_wait_for_the_whole_axis():
    @T.macro
    def read(at, S, row, rows, Y):
        place, first = at[0], at[1]
        for step in T.serial(2):
            T.copy(S[W.rank(), place, first, 0], rows)
            T.copy(rows, Y[step * 4, 0])

    program = reading(read)
    assert waits_of(program) == [("1 x 8 x 4", 1)]  # moved out of the loop
    runs(program, lambda at, X: np.concatenate([X[at[0], at[1] : at[1] + 4]] * 2))


def test_tiles_at_multiples_of_their_size_wait_for_one():
    @T.macro
    def read(at, S, row, rows, Y):
        tile = at[0] % 2
        T.copy(S[W.rank(), 1, tile * 4, 0], rows)
        T.copy(rows, Y[0, 0])

    program = reading(read)
    assert waits_of(program) == [("1 x 4 x 4", 1)]
    runs(
        program, lambda at, X: np.concatenate([X[1].reshape(2, 4, N)[at[0] % 2], np.zeros((4, N))])
    )


def test_a_wait_leaves_an_unknown_loop_with_a_guard():
    @T.macro
    def read(at, S, row, rows, Y):
        count = at[2]
        for r in T.serial(count):
            T.copy(S[W.rank(), at[0], at[3 + r], 0], rows)
            T.copy(rows, Y[r * 4, 0])

    program = reading(read)
    assert "if 0 < count:\n" in text_of(program)
    runs(
        program,
        lambda at, X: np.concatenate(
            [X[at[0], at[3 + r] :][:4] * (r < at[2]) for r in range(ROWS // 4)]
        ),
    )


@pytest.mark.parametrize("rewritten", [False, True])
def test_a_wait_stays_where_its_index_may_change(rewritten):
    @T.macro
    def read(at, S, row, rows, Y):
        chosen = T.alloc_shared((1,), "int32")
        chosen[0] = at[0]
        T.sync_threads()
        for r in T.serial(2):
            T.copy(S[W.rank(), chosen[0], r * 0 + at[1], 0], rows)
            T.copy(rows, Y[r * 4, 0])
            if rewritten:
                T.sync_threads()
                chosen[0] = at[r + 4]
                T.sync_threads()

    program = reading(read)
    assert waits_of(program) == [("1 x 8 x 4", 2 if rewritten else 1)]
    second = 4 if rewritten else 0
    runs(
        program,
        lambda at, X: np.concatenate([X[at[n], at[1] : at[1] + 4] for n in (0, second)]),
    )


def test_a_wait_covers_the_same_variable_only():
    @T.macro
    def read(at, S, row, rows, Y):
        place, other = at[0], at[0]
        T.copy(S[W.rank(), place, at[1], 0], rows)
        T.copy(rows, Y[0, 0])
        T.copy(S[W.rank(), place, at[2], 0], rows)
        T.copy(rows, Y[4, 0])
        T.copy(S[W.rank(), other, at[2], 0], rows)

    assert len(waits_of(reading(read))) == 2


def test_threads_that_read_apart_wait_for_all():
    @T.macro
    def read(at, S, row, rows, Y):
        for r, j in T.Parallel(ROWS, N):
            Y[r, j] = S[W.rank(), at[r], r, j]

    program = reading(read)
    assert waits_of(program) == [("3 x 8 x 4", 1)]
    runs(program, lambda at, X: X[at[:ROWS], np.arange(ROWS)])


def test_a_register_of_one_value_is_one_place_and_one_of_each_thread_is_all():
    def read_with(value):
        @T.macro
        def read(at, S, row, rows, Y):
            place = T.alloc_var("int32")
            place = value(at, T.get_thread_binding())
            for j in T.Parallel(N):
                Y[0, j] = S[W.rank(), place, 0, j]

        return reading(read)

    assert waits_of(read_with(lambda at, i: at[0])) == [("1 x 1 x 4", 1)]
    assert waits_of(read_with(lambda at, i: at[i % 16])) == [("3 x 1 x 4", 1)]


def test_a_condition_keeps_its_wait():
    @T.macro
    def read(at, S, row, rows, Y):
        if at[0] == 1:
            T.copy(S[W.rank(), 2, 0, 0], Y)

    program = reading(read)
    assert "if at[0] == 1:\n" in text_of(program)
    runs(program, lambda at, X: X[2] * (at[0] == 1))


def test_data_that_may_not_be_read_is_complete_at_the_end():
    @T.macro
    def read(at, S, row, rows, Y):
        T.copy(S[W.rank(), at[0], 0, 0], Y)

    @T.macro
    def read_all(at, S, row, rows, Y):
        for place in T.serial(PLACES):
            T.copy(S[W.rank(), place, 0, 0], Y)

    def flags(program):
        return {op.flag for op in tw.explain(program, RANKS).ops if op.kind == "wait"}

    assert flags(reading(read)) - flags(reading(read_all)) == {"S_complete"}
