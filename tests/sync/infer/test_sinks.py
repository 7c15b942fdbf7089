"""With ``tileweave.sink_signals`` signals sink where that is right, and stay where it is not."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave import passes
from tileweave.passes.sync.infer.infer_sync import explained

from ..programs import F32, integers

M, N, ROUNDS = 4, 32, 3
ROWS = 2 * ROUNDS * M
SUNK = "sunk past the loop over _k in the next round of the loop over turn"
RIGHT = {}
"""Programs of two blocks that double rows three times and bring them to the right neighbour."""


def signals(expected):
    """Their signals have these reasons."""

    def add(make):
        RIGHT[make.__name__] = make, expected
        return make

    return add


@signals([SUNK, "at once where it does not sink"])
def sinks(ranks):
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                T.copy(tile, S[(W.rank() + 1) % ranks, row, 0])
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


@signals([SUNK, "at once where it does not sink"])
def as_many_rounds_as_the_block_has(ranks):
    """Block 0 has four rounds, from 1 on, block 1 has two."""

    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(1, 5 - 2 * block):
                row = (turn - 1 + 4 * block) * M
                T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                T.copy(tile, S[(W.rank() + 1) % ranks, row, 0])
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


@signals([SUNK])
def always_sinks(ranks):
    """The last round brings nothing, so every signal has a next round."""

    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(ROUNDS + 1):
                row = (turn * 2 + block) * M
                for _k in T.serial(1):
                    T.copy(X[row, 0], tile)
                if turn == ROUNDS:
                    T.clear(tile)
                else:
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 8.0 * tile[i, j]
                    T.copy(tile, S[(W.rank() + 1) % ranks, row, 0])
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


@signals([SUNK])
def reads_the_round_before_behind_its_store(ranks):
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(ROUNDS + 1):
                row = (turn * 2 + block) * M
                if turn < ROUNDS:
                    T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                if turn < ROUNDS:
                    T.copy(tile, S[(W.rank() + 1) % ranks, row, 0])
                if turn > 0:
                    T.copy(S[W.rank(), row - 2 * M, 0], tile)
                    T.copy(tile, Y[row - 2 * M, 0])

    return program


@signals(["it does not sink: blocks would wait for what they have not told yet"])
def reads_the_round_before_ahead_of_its_store(ranks):
    """Everyone would wait in round 1 for signals that stand behind these waits."""

    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(ROUNDS + 1):
                row = (turn * 2 + block) * M
                if turn > 0:
                    T.copy(S[W.rank(), row - 2 * M, 0], tile)
                    T.copy(tile, Y[row - 2 * M, 0])
                if turn < ROUNDS:
                    T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                if turn < ROUNDS:
                    T.copy(tile, S[(W.rank() + 1) % ranks, row, 0])

    return program


@signals(["it does not sink: blocks would wait for what they have not told yet"])
def reads_the_same_round(ranks):
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                T.copy(tile, S[(W.rank() + 1) % ranks, row, 0])
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


@signals(["it does not sink: no loop comes before it in a round of the loop over turn"])
def nothing_to_sink_past(ranks):
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(X[row, 0], tile)
                for i, j in T.Parallel(M, N):
                    S[(W.rank() + 1) % ranks, row + i, j] = 8.0 * tile[i, j]
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


@signals(["it does not sink: it stands in no loop"])
def no_loop(ranks):
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((ROWS // 2, N), F32)
            T.copy(X[block * (ROWS // 2), 0], tile)
            for _k in T.serial(3):
                for i, j in T.Parallel(ROWS // 2, N):
                    tile[i, j] = 2.0 * tile[i, j]
            T.copy(tile, S[(W.rank() + 1) % ranks, block * (ROWS // 2), 0])
            T.copy(S[W.rank(), block * (ROWS // 2), 0], tile)
            T.copy(tile, Y[block * (ROWS // 2), 0])

    return program


@signals(["it does not sink: no block gets there in another round of the loop over turn"])
def one_round_for_each_block(ranks):
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((ROWS // 2, N), F32)
            for turn in T.serial(2):
                if turn == block:
                    T.copy(X[turn * (ROWS // 2), 0], tile)
                    for _k in T.serial(3):
                        for i, j in T.Parallel(ROWS // 2, N):
                            tile[i, j] = 2.0 * tile[i, j]
                    T.copy(tile, S[(W.rank() + 1) % ranks, turn * (ROWS // 2), 0])
            T.copy(S[W.rank(), block * (ROWS // 2), 0], tile)
            T.copy(tile, Y[block * (ROWS // 2), 0])

    return program


@signals([SUNK, "at once where it does not sink"] * 2)
def stores_of_some_threads_and_two_branches(ranks):
    """What threads store under a condition of theirs is told of by the block as a whole; one block
    stores in the one branch, the other in the other."""

    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            tile = T.alloc_shared((M, N), F32)
            right = (W.rank() + 1) % ranks
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                if (turn + block) % 2 == 0:
                    if T.get_thread_binding() < 16:
                        for i, j in T.grid(M, 2):
                            S[right, row + i, T.get_thread_binding() * 2 + j] = tile[
                                i, T.get_thread_binding() * 2 + j
                            ]
                else:
                    T.copy(tile, S[right, row, 0])
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


def with_tma_copy(ranks, separate):
    """A store that does not wait until its tile has been read; the main loop writes that tile, or a
    ``separate`` one."""

    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(2, threads=32) as block:
            S = W.alloc_symmetric((ROWS, N), F32)
            stored = T.alloc_shared((M, N), F32)
            tile = T.alloc_shared((M, N), F32) if separate else stored
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(X[row, 0], tile)
                for _k in T.serial(3):
                    for i, j in T.Parallel(M, N):
                        tile[i, j] = 2.0 * tile[i, j]
                if turn < ROUNDS:
                    if separate:
                        T.copy(tile, stored)
                    T.tma_copy(stored, S[(W.rank() + 1) % ranks, row, 0])
            for turn in T.serial(ROUNDS):
                row = (turn * 2 + block) * M
                T.copy(S[W.rank(), row, 0], tile)
                T.copy(tile, Y[row, 0])

    return program


@signals([SUNK, "at once where it does not sink"])
def tma_copy_waits_with_the_signal(ranks):
    return with_tma_copy(ranks, True)


def reasons(program, ranks=3, **configs) -> list[str]:
    """Where each signal of data stands, and why."""
    program, _ = passes.split_options(program, configs)
    for one in passes.PREPARE_PASSES:
        program = one.run(program, ranks, 1 << 40)
    found = [o for o in explained(program, ranks, 1 << 40)[1].ops if o.kind == "signal"]
    return [o.reason.partition("; ")[2] for o in found if o.flag == "S_arrived"]


@pytest.mark.parametrize("name", RIGHT)
def test_where_it_stands(name):
    make, expected = RIGHT[name]
    assert sorted(reasons(make(3), **{"tileweave.sink_signals": True})) == sorted(expected)
    assert set(reasons(make(3))) == {""}, "only where it is asked for"


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_schedule_is_right(name, ranks):
    program = RIGHT[name][0](ranks)
    inputs = [{"X": integers(np.random.default_rng(r), ROWS, N)} for r in range(ranks)]
    out = tw.simulate(
        program, ranks, inputs, schedules=4, pass_configs={"tileweave.sink_signals": True}
    )
    for rank, tensors in enumerate(out):
        assert np.array_equal(tensors["Y"], 8 * inputs[rank - 1]["X"])


def test_a_tile_that_is_overwritten_ahead_of_the_sunk_wait():
    """Nothing keeps the program from it, as without the option; the simulator reports it."""
    inputs = [{"X": integers(np.random.default_rng(r), ROWS, N)} for r in range(2)]
    with pytest.raises(tw.SimulationError, match="reuse: tile is overwritten"):
        tw.simulate(
            with_tma_copy(2, False), 2, inputs, schedules=4,
            pass_configs={"tileweave.sink_signals": True},
        )  # fmt: skip
