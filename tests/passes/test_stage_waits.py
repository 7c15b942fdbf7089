"""Pipelined loops that wait for signals of their own, or of blocks that wait for them."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.lines import named_lines
from tests.releases import RECORDS_LINES
from tileweave import language as W

STEPS, ROW = 6, 128
X, Z = (T.Tensor((STEPS, ROW), "int32") for _ in range(2))
S = W.Symmetric((STEPS + 1, ROW), "int32")
FLAGS, FREE = (W.Symmetric((STEPS + 1,), "uint32") for _ in range(2))
ARCHITECTURES = pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])


def run(program, ranks, arch, flags=()):
    """Return the result of each rank, and the ``x`` of each."""
    rng = np.random.default_rng(ranks)
    inputs = [
        {"x": rng.integers(0, 50, (STEPS, ROW)).astype(np.int32)}
        | {name: np.zeros(STEPS + 1, np.uint32) for name in flags}
        for _ in range(ranks)
    ]
    epochs = 1 if flags else 2
    outputs = tw.validate(program, ranks, inputs, arch=arch, schedules=2, epochs=epochs)
    return [output["z"] for output in outputs], [given["x"] for given in inputs]


def passed_on(first, steps=STEPS):
    """Return the rows of each rank after each step: twice those of the previous rank, plus 1."""
    rows, results = np.stack(first), []
    for _ in range(steps):
        rows = 2 * np.roll(rows, 1, axis=0) + 1
        results.append(rows)
    return np.stack(results, axis=1)


@factory
def ring(x: X, z: Z, *, ranks=1, num_stages=2, use_tma=True):
    """Each iteration loads what the previous one of the previous rank has stored."""
    with T.Kernel(1, threads=128):
        s = W.alloc_symmetric((STEPS + 1, ROW), "int32")
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        peer = (W.rank() + 1) % ranks
        for i in T.Parallel(ROW):
            s[peer, 0, i] = x[0, i]
        for k in T.Pipelined(STEPS, num_stages=num_stages):
            T.copy(s[W.rank(), k, 0], tile, disable_tma=not use_tma)
            for i in T.Parallel(ROW):
                frag[i] = tile[i] * 2 + 1
            T.copy(frag, z[k, 0])
            T.copy(frag, s[peer, k + 1, 0])


@pytest.mark.parametrize(
    ("arch", "use_tma"), [("sm_80", True), ("sm_90a", True), ("sm_90a", False)]
)
@pytest.mark.parametrize("num_stages", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_waits_for_signals_of_earlier_iterations(ranks, num_stages, arch, use_tma):
    program = ring(ranks=ranks, num_stages=num_stages, use_tma=use_tma)
    results, x = run(program, ranks, arch)
    assert np.array_equal(results, passed_on([given[0] for given in x]))


@factory
def same_iteration(x: X, z: Z, *, ranks=1):
    """Each iteration loads what it has stored itself."""
    with T.Kernel(1, threads=128):
        s = W.alloc_symmetric((STEPS, ROW), "int32")
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        for k in T.Pipelined(STEPS, num_stages=2):
            for i in T.Parallel(ROW):
                s[(W.rank() + 1) % ranks, k, i] = x[k, i]
            T.copy(s[W.rank(), k, 0], tile)
            for i in T.Parallel(ROW):
                frag[i] = tile[i] * 2 + 1
            T.copy(frag, z[k, 0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_waits_for_a_signal_of_the_same_iteration(ranks):
    results, x = run(same_iteration(ranks=ranks), ranks, "sm_80")
    assert np.array_equal(results, 2 * np.roll(x, 1, axis=0) + 1)
    with pytest.raises(tw.TileWeaveError, match=r"loads of T\.Pipelined overtake it, because"):
        tw.emit(same_iteration(ranks=ranks), arch="sm_90a", world_size=ranks)


@factory
def two_slots(x: X, z: Z, s: S, full: FLAGS, free: FREE):
    """A block stores to two slots of the peer, and waits until its other block has read them."""
    with T.Kernel(2, threads=128) as block:
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        peer = 1 - W.rank()
        if block == 0:
            for k in T.serial(STEPS):
                if k >= 2:
                    W.wait_ge(free[W.rank(), k - 2], 1)
                for i in T.Parallel(ROW):
                    s[peer, k % 2, i] = x[k, i]
                W.signal(full[peer, k])
        else:
            for k in T.Pipelined(STEPS, num_stages=3):
                W.wait_ge(full[W.rank(), k], 1)
                T.copy(s[W.rank(), k % 2, 0], tile)
                for i in T.Parallel(ROW):
                    frag[i] = tile[i] * 2 + 1
                T.copy(frag, z[k, 0])
                W.signal(free[peer, k])


@ARCHITECTURES
def test_signals_that_free_memory_are_not_delayed(arch):
    """A loop with three stages would wait for a third slot before it has freed the first."""
    results, x = run(two_slots(), 2, arch, flags=("full", "free"))
    assert np.array_equal(results, 2 * np.array(x[::-1]) + 1)


@factory
def scheduled(last_stage, order, x: X, z: Z, s: S, flags: FLAGS):
    with T.Kernel(1, threads=128):
        tile, frag = T.alloc_shared((ROW,), "int32"), T.alloc_fragment((ROW,), "int32")
        peer = 1 - W.rank()
        for i in T.Parallel(ROW):
            s[peer, 0, i] = x[0, i]
        W.signal(flags[peer, 0])
        stage = [0, 0, last_stage, last_stage, last_stage]
        for k in T.Pipelined(STEPS, num_stages=2, order=list(order), stage=stage):
            W.wait_ge(flags[W.rank(), k], 1)
            T.copy(s[W.rank(), k, 0], tile)
            for i in T.Parallel(ROW):
                frag[i] = tile[i] * 2 + 1
            T.copy(frag, z[k, 0])
            if k < STEPS - 1:
                T.copy(frag, s[peer, k + 1, 0])
                W.signal(flags[peer, k + 1])
            else:
                T.clear(frag)


@pytest.mark.parametrize(("last_stage", "order"), [(0, (0, 1, 2, 3, 4)), (1, (3, 4, 0, 1, 2))])
@ARCHITECTURES
def test_schedules_that_keep_signals_before_waits_are_legal(last_stage, order, arch):
    results, x = run(scheduled(last_stage, order), 2, arch, flags=("flags",))
    assert np.array_equal(results, passed_on([given[0] for given in x]))


def test_schedule_that_delays_a_signal_is_refused():
    with pytest.raises(
        tw.TileWeaveError,
        match=r"wait_ge: in stage 0 of T.Pipelined, with order 0, runs before signal of an earlier "
        r"iteration, in stage 1 with order 4, and may wait for it; expected both in one stage, in "
        r"the order of the program",
    ) as error:
        tw.emit(scheduled(1, (0, 1, 2, 3, 4)), arch="sm_80", world_size=2)
    assert not RECORDS_LINES or len(named_lines(str(error.value), run)) == 2
