"""Proofs that resident blocks suffice, without a simulation of the launch."""

import pytest
import tilelang.language as T

import tileweave as tw
from tileweave import language as W
from tileweave.passes import for_group, with_options
from tileweave.passes.sync.infer import residency

RANKS, N = 2, 32


def exchange(blocks, distance=1, waves=1, reads_first=False):
    """Each block writes rows at the next rank in its first iterations, and reads those of another
    block in the others; in the text of the program the reads come first or last."""

    @T.prim_func
    def program(
        S: W.Symmetric((waves, blocks, N), "int32"), Y: T.Tensor((waves, blocks, N), "int32")
    ):
        with T.Kernel(blocks, threads=N) as block:
            me, other = W.rank(), (block + distance) % blocks
            for wave in T.serial(2 * waves):
                if reads_first and wave >= waves:
                    for i in T.Parallel(N):
                        Y[wave - waves, block, i] = S[me, wave - waves, other, i]
                if wave < waves:
                    for i in T.Parallel(N):
                        S[(me + 1) % RANKS, wave, block, i] = i
                if not reads_first and wave >= waves:
                    for i in T.Parallel(N):
                        Y[wave - waves, block, i] = S[me, wave - waves, other, i]

    return program


def infer(program, resident):
    program = with_options(program, {"tileweave.resident_blocks": resident})
    return for_group(program, RANKS, 1 << 30, ["group", "sync"])


@pytest.fixture
def no_simulation(monkeypatch):
    def refuse(*_):
        raise AssertionError("the launch is simulated")

    monkeypatch.setattr(residency, "_Launch", refuse)


@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("waves", [1, 3])
def test_blocks_that_wait_for_later_ones_are_resident(no_simulation, waves, reads_first):
    infer(exchange(8, 3, waves, reads_first), resident=8)


def pairs(blocks):
    """Return a program in which both blocks of each pair wait for each other."""

    @T.prim_func
    def program(S: W.Symmetric((blocks, N), "int32"), Y: T.Tensor((blocks, N), "int32")):
        with T.Kernel(blocks, threads=N) as block:
            for i in T.Parallel(N):
                S[(W.rank() + 1) % RANKS, block, i] = i
            for i in T.Parallel(N):
                Y[block, i] = S[W.rank(), block // 2 * 2 + 1 - block % 2, i]

    return program


def test_only_blocks_that_wait_for_each_other_must_be_resident(no_simulation):
    infer(pairs(8), resident=2)


@pytest.mark.parametrize(("program", "resident"), [(exchange(8, 3), 3), (pairs(8), 1)])
def test_too_few_resident_blocks_are_refused(program, resident):
    with pytest.raises(tw.LanguageError, match="resident blocks"):
        infer(program, resident)


def test_a_signal_after_a_wait_for_it_is_refused():
    @T.prim_func
    def program(S: W.Symmetric((2, N), "int32"), Y: T.Tensor((2, N), "int32")):
        with T.Kernel(2, threads=N) as block:
            for i in T.Parallel(N):
                Y[block, i] = S[W.rank(), 1 - block, i]
            for i in T.Parallel(N):
                S[(W.rank() + 1) % RANKS, block, i] = i

    with pytest.raises(tw.LanguageError, match="circular wait"):
        infer(program, 132)
