"""Waits for phases of mbarriers, in programs whose warps load and compute."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tileweave import language as W

STEPS = 20


@factory
def pipeline(
    ready_parity, free_parity, stages,
    A: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((STEPS, 64, 64), "float16"),
):  # fmt: skip
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((stages, 64, 64), "float16")
        ready = T.alloc_barrier(arrive_count=[128] * stages)
        free = T.alloc_barrier(arrive_count=[128] * stages)
        if T.get_thread_binding() < 128:
            for k in T.serial(STEPS):
                T.barrier_wait(free[k % stages], free_parity(k))
                T.tma_copy(A[k, :, :], tile[k % stages, :, :], barrier=ready[k % stages])
                T.barrier_arrive(ready[k % stages])
        else:
            for k in T.serial(STEPS):
                T.barrier_wait(ready[k % stages], ready_parity(k))
                T.copy(tile[k % stages, :, :], C[k, :, :])
                T.barrier_arrive(free[k % stages])


@factory
def kept_tile(
    tiles, A: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((STEPS, 64, 64), "float16")
):
    """Add the first tile to each; consumers wait for it again in each iteration."""
    with T.Kernel(1, threads=256):
        first, tile = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        ready = T.alloc_barrier(arrive_count=[128, 128])
        free, steps = T.alloc_barrier(arrive_count=[128, 128]), STEPS // tiles
        if T.get_thread_binding() < 128:
            for i in T.serial(tiles):
                T.barrier_wait(free[0], i % 2 ^ 1)
                T.tma_copy(A[i * steps, :, :], first, barrier=ready[0])
                T.barrier_arrive(ready[0])
                for k in T.serial(steps):
                    T.barrier_wait(free[1], (i * steps + k) % 2 ^ 1)
                    T.tma_copy(A[i * steps + k, :, :], tile, barrier=ready[1])
                    T.barrier_arrive(ready[1])
        else:
            for i in T.serial(tiles):
                for k in T.serial(steps):
                    T.barrier_wait(ready[0], i % 2)
                    T.barrier_wait(ready[1], (i * steps + k) % 2)
                    for row, column in T.Parallel(64, 64):
                        C[i * steps + k, row, column] = first[row, column] + tile[row, column]
                    T.barrier_arrive(free[1])
                T.barrier_arrive(free[0])


@factory
def one_load(parity, A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=256):
        tile, ready = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(arrive_count=128)
        if T.get_thread_binding() < 128:
            T.tma_copy(A, tile, barrier=ready)
            T.barrier_arrive(ready)
        else:
            T.barrier_wait(ready, parity)
            T.copy(tile, C)


@factory
def known_by_others(
    A: T.Tensor((2, 64, 64), "float16"), n: T.int32, C: T.Tensor((2, 64, 64), "float16")
):
    """Warps take turns to wait, and the number of iterations is unknown."""
    with T.Kernel(1, threads=128):
        tile, ready = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(arrive_count=128)
        for k in T.serial(n):
            T.tma_copy(A[k, :, :], tile, barrier=ready)
            T.barrier_arrive(ready)
            if T.get_thread_binding() // 64 == k % 2:
                T.barrier_wait(ready, k % 2)
            T.sync_threads()
            T.copy(tile, C[k, :, :])
            T.sync_threads()


@factory
def handed_over(A: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((STEPS, 64, 64), "float16")):
    """Two groups take turns to read a tile. The second one waits for phase 1 first, after the first
    one has waited for phase 0."""
    with T.Kernel(1, threads=384):
        tile = T.alloc_shared((64, 64), "float16")
        ready, free = T.alloc_barrier(arrive_count=128), T.alloc_barrier(arrive_count=128)
        turn, tx = T.alloc_barrier(arrive_count=[128, 128]), T.get_thread_binding()
        if tx < 128:
            for k in T.serial(STEPS):
                T.barrier_wait(free, k % 2 ^ 1)
                T.tma_copy(A[k, :, :], tile, barrier=ready)
                T.barrier_arrive(ready)
        elif tx < 256:
            for k in T.serial(STEPS // 2):
                T.barrier_wait(turn[1], k % 2 ^ 1)
                T.barrier_wait(ready, 0)
                T.copy(tile, C[2 * k, :, :])
                T.barrier_arrive(turn[0])
                T.barrier_arrive(free)
        else:
            for k in T.serial(STEPS // 2):
                T.barrier_wait(turn[0], k % 2)
                T.barrier_wait(ready, 1)
                T.copy(tile, C[2 * k + 1, :, :])
                T.barrier_arrive(turn[1])
                T.barrier_arrive(free)


@factory
def one_load_of_blocks(
    branch, A: T.Tensor((4, 64, 64), "float16"), C: T.Tensor((4, 64, 64), "float16")
):
    """Each half of the blocks has an mbarrier of its own."""
    with T.Kernel(4, threads=256) as bx:
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        ready = T.alloc_barrier(arrive_count=[128, 128])
        if branch == "in roles":
            if tx >= 128:
                if bx < 2:
                    T.barrier_wait(ready[0], 0)
                    T.copy(tile, C[bx, :, :])
                else:
                    T.barrier_wait(ready[1], 0)
                    T.copy(tile, C[bx, :, :])
            else:
                if bx < 2:
                    T.tma_copy(A[bx, :, :], tile, barrier=ready[0])
                    T.barrier_arrive(ready[0])
                else:
                    T.tma_copy(A[bx, :, :], tile, barrier=ready[1])
                    T.barrier_arrive(ready[1])
        else:
            if tx < 128:
                T.tma_copy(A[bx, :, :], tile, barrier=ready[bx % 2])
                T.barrier_arrive(ready[bx % 2])
            if tx >= 128:
                T.barrier_wait(ready[bx % 2], 1 if branch == "wrong" else 0)
                T.copy(tile, C[bx, :, :])


@factory
def two_barriers(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
    """Both groups of threads pass barrier 3, then barrier 4."""
    with T.Kernel(1, threads=256):
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        if tx < 128:
            for i in T.serial(32):
                tile[i * 2 + tx // 64, tx % 64] = A[i * 2 + tx // 64, tx % 64]
            T.sync_threads(3, 256)
            T.sync_threads(4, 256)
        else:
            T.sync_threads(3, 256)
            for i in T.serial(32):
                C[i * 2 + tx // 64 - 2, tx % 64] = tile[i * 2 + tx // 64 - 2, tx % 64]
            T.sync_threads(4, 256)


@factory
def phase_in_a_variable(
    first,
    loads,
    steps,
    A: T.Tensor((STEPS, 64, 64), "float16"),
    C: T.Tensor((STEPS, 64, 64), "float16"),
):  # fmt: skip
    """One warp loads, and phases are counted in variables."""
    with T.Kernel(1, threads=256):
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        ready, free = T.alloc_barrier(arrive_count=128), T.alloc_barrier(arrive_count=128)
        phase, free_phase = T.alloc_var("int32", init=0), T.alloc_var("int32", init=first)
        if tx >= 128:
            for k in T.serial(loads):
                T.barrier_wait(free, free_phase)
                T.tma_copy(A[k, :, :], tile, barrier=ready)
                T.barrier_arrive(ready)
                free_phase = free_phase ^ 1
        else:
            for k in T.serial(steps):
                T.barrier_wait(ready, phase)
                T.copy(tile, C[k, :, :])
                T.barrier_arrive(free)
                phase = phase ^ 1


@factory
def counted_stages(
    A: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((STEPS, 64, 64), "float16")
):
    """Stages and phases are counted in registers."""
    with T.Kernel(1, threads=256):
        tile = T.alloc_shared((2, 64, 64), "float16")
        ready, free = T.alloc_barrier([128, 128]), T.alloc_barrier([128, 128])
        stage, phases = T.alloc_var("int32", init=0), T.alloc_local((2,), "int32")
        if T.get_thread_binding() < 128:
            phases[0] = 0
            phases[1] = 0
            for k in T.serial(STEPS):
                T.barrier_wait(ready[stage], phases[stage])
                T.copy(tile[stage, :, :], C[k, :, :])
                T.barrier_arrive(free[stage])
                phases[stage] = phases[stage] ^ 1
                stage = stage ^ 1
        else:
            phases[0] = 1
            phases[1] = 1
            for k in T.serial(STEPS):
                T.barrier_wait(free[stage], phases[stage])
                T.tma_copy(A[k, :, :], tile[stage, :, :], barrier=ready[stage])
                T.barrier_arrive(ready[stage])
                phases[stage] = phases[stage] ^ 1
                stage = stage ^ 1


@factory
def branches_in_a_row(
    load, A: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((STEPS, 64, 64), "float16")
):
    """Consumers precede producers, which are a warp group or one thread; phases are counted."""
    with T.Kernel(1, threads=256):
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        ready, free = T.alloc_barrier(1 if load == "by one" else 128), T.alloc_barrier(128)
        if tx < 128:
            phase = T.alloc_var("int32", init=0)
            for k in T.serial(STEPS):
                T.barrier_wait(ready, phase)
                for i in T.serial(32):
                    C[k, i * 2 + tx // 64, tx % 64] = tile[i * 2 + tx // 64, tx % 64]
                T.barrier_arrive(free)
                phase = phase ^ 1
        if load == "by one":
            if tx == 128:
                for k in T.serial(STEPS):
                    T.barrier_wait(free, k % 2 ^ 1)
                    T.tma_copy(A[k, :, :], tile, barrier=ready)
                    T.barrier_arrive(ready)
        else:
            if tx >= 128:
                free_phase = T.alloc_var("int32", init=1)
                for k in T.serial(STEPS):
                    T.barrier_wait(free, free_phase)
                    T.async_copy(A[k, :, :], tile)
                    T.cp_async_barrier_noinc(ready)
                    free_phase = free_phase ^ 1


@factory
def beside_a_pipeline(
    parity,
    A: T.Tensor((STEPS, 64, 64), "float16"),
    B: T.Tensor((64, 64), "float16"),
    C: T.Tensor((64, 64), "float32"),
):  # fmt: skip
    """TileLang divides the pipelined loop into producers and consumers."""
    with T.Kernel(1, threads=128):
        a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
        total, ready = T.alloc_fragment((64, 64), "float32"), T.alloc_barrier(128)
        T.clear(total)
        T.tma_copy(B, b, barrier=ready)
        T.barrier_arrive(ready)
        T.barrier_wait(ready, parity)
        for k in T.Pipelined(STEPS, num_stages=2):
            T.copy(A[k, :, :], a)
            T.gemm(a, b, total)
        T.copy(total, C)


@factory
def nested(
    case, A: T.Tensor((STEPS, 64, 64), "float16"), n: T.int32,
    C: T.Tensor((STEPS, 64, 64), "float16"),
):  # fmt: skip
    """The stages depend on a number of iterations that is not known."""
    with T.Kernel(1, threads=256):
        tile, tx = T.alloc_shared((2, 64, 64), "float16"), T.get_thread_binding()
        ready, free = T.alloc_barrier([128, 128]), T.alloc_barrier([128, 128])
        if tx < 128:
            for o, k in T.grid(2, n):
                i = o * n + k
                if case != "late wait":
                    T.barrier_wait(ready[i % 2], i // 2 % 2)
                for row, column in T.Parallel(64, 64):
                    C[i, row, column] = tile[i % 2, 63 - row, column]
                if case == "late wait":
                    T.barrier_wait(ready[i % 2], i // 2 % 2)
                T.barrier_arrive(free[i % 2])
        if tx >= 128:
            for o, k in T.grid(2, n):
                i = o * n + k
                if case != "no wait":
                    T.barrier_wait(free[i % 2], i // 2 % 2 ^ 1)
                T.tma_copy(A[i, :, :], tile[i % 2, :, :], barrier=ready[i % 2])
                T.barrier_arrive(ready[i % 2])


@factory
def chosen_tiles(A: T.Tensor((64, 64, 64), "float16"), C: T.Tensor((64, 64, 64), "float16")):
    """Consumers copy the tiles of some iterations."""
    with T.Kernel(1, threads=256):
        tile, tx = T.alloc_shared((2, 64, 64), "float16"), T.get_thread_binding()
        ready, free = T.alloc_barrier([128, 128]), T.alloc_barrier([128, 128])
        if tx < 128:
            for k in T.serial(64):
                T.barrier_wait(ready[k % 2], k // 2 % 2)
                if k == 41 or k % 3 == 1:
                    T.copy(tile[k % 2, :, :], C[k, :, :])
                T.barrier_arrive(free[k % 2])
        else:
            for k in T.serial(64):
                T.barrier_wait(free[k % 2], k // 2 % 2 ^ 1)
                T.tma_copy(A[k, :, :], tile[k % 2, :, :], barrier=ready[k % 2])
                T.barrier_arrive(ready[k % 2])


@factory
def bulk_loads(threads, A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        ready = T.alloc_barrier(threads)
        if tx < threads:
            W.bulk_load(tile[0, 0], A[0, 0], 64 * 64, ready[0])
            T.barrier_arrive(ready)
        T.barrier_wait(ready, 0)
        for i, j in T.Parallel(64, 64):
            C[i, j] = tile[63 - i, j]


@factory
def bulk_stores(
    row, size, A: T.Tensor((8, 64, 64), "float16"), C: T.Tensor((8, 64, 64), "float16")
):
    with T.Kernel(8, threads=128) as bx:
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        for i, j in T.Parallel(64, 64):
            tile[i, j] = A[bx, i, j]
        T.sync_threads()
        W.fence_proxy_async()
        if tx < 32:
            W.bulk_store(C[bx, row(bx, tx), 0], tile[tx, 0], size)
            W.bulk_commit()
            W.bulk_wait(0)


@factory
def store_between_roles(
    case, A: T.Tensor((STEPS, 64, 64), "float16"), C: T.Tensor((STEPS, 64, 64), "float16"),
    D: T.Tensor((2, 384), "int32"),
):  # fmt: skip
    """All threads store elements between the branches of producers and consumers."""
    with T.Kernel(1, threads=384):
        tile, tx = T.alloc_shared((64, 64), "float16"), T.get_thread_binding()
        ready, free = T.alloc_barrier(arrive_count=128), T.alloc_barrier(arrive_count=128)
        if tx < 128:
            for k in T.serial(STEPS):
                T.barrier_wait(free, k % 2 ^ 1)
                T.tma_copy(A[k, :, :], tile, barrier=ready)
                T.barrier_arrive(ready)
        twice = 2 * tx
        for i in T.serial(2):
            D[i, tx] = twice + i
        if tx >= 256:
            for k in T.serial(STEPS):
                T.barrier_wait(ready, k % 2)
                if case == "early arrival":
                    T.barrier_arrive(free)
                for i, j in T.Parallel(64, 64):
                    C[k, i, j] = tile[i, 63 - j]
                if case == "right":
                    T.barrier_arrive(free)


@factory
def load_by_lanes(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16")):
    with T.Kernel(1, threads=128):
        tile, ready = T.alloc_shared((64, 64), "float16"), T.alloc_barrier(8)
        if T.get_thread_binding() < 8:
            T.tma_copy(A, tile, barrier=ready)
            T.barrier_arrive(ready)
        T.barrier_wait(ready, 0)
        T.copy(tile, C)


def phase(stages, first=0):
    return lambda k: ((k + first) // stages) % 2


RIGHT = [(phase(stages), lambda k, s=stages: phase(s)(k) ^ 1, stages) for stages in (1, 2, 3)]


def validate(program, shape, **scalars):
    """Return what ``program`` is given, and what it returns at the device level."""
    a = np.random.default_rng(0).integers(0, 9, shape).astype(np.float16)
    (out,) = tw.validate(program, 1, [{"A": a, **scalars}], "sm_90a")
    return a, out["C"]


@pytest.mark.parametrize("operands", RIGHT, ids=lambda operands: f"{operands[-1]} stages")
def test_right_phases(operands):
    np.testing.assert_array_equal(*validate(pipeline(*operands), (STEPS, 64, 64)))


@pytest.mark.parametrize("tiles", [1, 4])
def test_phases_that_are_awaited_again(tiles):
    a, c = validate(kept_tile(tiles), (STEPS, 64, 64))
    np.testing.assert_array_equal(c, a + np.repeat(a[:: STEPS // tiles], STEPS // tiles, axis=0))


def test_phases_that_other_threads_wait_for():
    np.testing.assert_array_equal(*validate(handed_over(), (STEPS, 64, 64)))


def test_phases_that_other_threads_know():
    np.testing.assert_array_equal(*validate(known_by_others(), (2, 64, 64), n=2))


@pytest.mark.parametrize("branch", ["in roles", "of roles"])
def test_phases_of_blocks(branch):
    np.testing.assert_array_equal(*validate(one_load_of_blocks(branch), (4, 64, 64)))


def test_barriers_of_two_branches():
    np.testing.assert_array_equal(*validate(two_barriers(), (64, 64)))


@pytest.mark.parametrize(
    "program", [counted_stages(), branches_in_a_row("by one"), branches_in_a_row("cp.async")]
)
def test_phases_and_roles_that_programs_choose(program):
    np.testing.assert_array_equal(*validate(program, (STEPS, 64, 64)))


def test_phases_of_an_unknown_number_of_iterations():
    a, c = validate(nested("right"), (STEPS, 64, 64), n=3)
    np.testing.assert_array_equal(c[:6], a[:6, ::-1])


@pytest.mark.parametrize("case", ["late wait", "no wait"])
def test_wrong_waits_in_an_unknown_number_of_iterations(case):
    with pytest.raises(tw.TileWeaveError, match=r"shared memory: a (read|write) of tile"):
        tw.emit(nested(case), arch="sm_90a", world_size=1)


def test_load_by_a_part_of_a_warp():
    with pytest.raises(tw.TileWeaveError, match="8 threads, a part of a warp, reach it") as error:
        tw.emit(load_by_lanes(), arch="sm_90a", world_size=1)
    assert "test_barrier_phases.py:" in str(error.value)


def test_phases_of_roles_with_other_conditions():
    assert "ready[(k & 1)].wait(" in tw.emit(chosen_tiles(), arch="sm_90a", world_size=1)


def test_load_by_several_threads():
    a, c = validate(bulk_loads(1), (64, 64))
    np.testing.assert_array_equal(c, a[::-1])
    with pytest.raises(tw.TileWeaveError, match="32 threads load the same part of tile") as error:
        tw.emit(bulk_loads(32), arch="sm_90a", world_size=1)
    assert "test_barrier_phases.py:" in str(error.value)


@pytest.mark.parametrize(
    ("row", "size"),
    [
        (lambda bx, tx: 0, 64),
        (lambda bx, tx: bx, 64),
        (lambda bx, tx: tx // 2, 64),
        (lambda bx, tx: tx, 128),
    ],
)
def test_bulk_stores_to_one_place(row, size):
    program = bulk_stores(row, size)
    with pytest.raises(tw.TileWeaveError, match="32 threads store the same part of C") as error:
        tw.emit(program, arch="sm_90a", world_size=1)
    assert "test_barrier_phases.py:" in str(error.value)


def test_bulk_stores_to_places_of_their_own():
    program = bulk_stores(lambda bx, tx: tx, 64)
    assert "tw::bulk_store(" in tw.emit(program, arch="sm_90a", world_size=1)


def test_store_between_roles():
    a = np.random.default_rng(0).integers(0, 9, (STEPS, 64, 64)).astype(np.float16)
    (out,) = tw.validate(store_between_roles("right"), 1, [{"A": a}], "sm_90a")
    np.testing.assert_array_equal(out["C"], a[:, :, ::-1])
    np.testing.assert_array_equal(out["D"], 2 * np.arange(384) + [[0], [1]])


def test_early_arrival_after_a_store_between_roles():
    with pytest.raises(tw.TileWeaveError, match="a write of tile after a read of tile") as error:
        tw.emit(store_between_roles("early arrival"), arch="sm_90a", world_size=1)
    assert "test_barrier_phases.py:" in str(error.value)


def test_phases_in_a_variable():
    assert "wait(free_phase)" in tw.emit(phase_in_a_variable(1, STEPS, STEPS), world_size=1)


@factory
def named_like_those_of_tilelang(C: T.Tensor((64,), "int32")):
    with T.Kernel(1, threads=64):
        mbarrier = T.alloc_barrier(64)
        T.barrier_arrive(mbarrier)
        T.barrier_wait(mbarrier, 1)
        T.barrier_wait(mbarrier, 1)
        C[T.get_thread_binding()] = 1


ENDLESS = [
    named_like_those_of_tilelang(),
    *(pipeline(phase(s), phase(s), s) for s in (1, 2, 3)),
    *(pipeline(phase(s), lambda k, s=s: phase(s, 1)(k) ^ 1, s) for s in (1, 2, 3)),
    *(pipeline(phase(s), lambda k: 0, s) for s in (2, 3)),
    *(pipeline(phase(s), lambda k: k % 2 ^ 1, s) for s in (2, 3)),
    phase_in_a_variable(0, STEPS, STEPS),
    phase_in_a_variable(1, STEPS - 1, STEPS),
    one_load_of_blocks("wrong"),
    beside_a_pipeline(1),
]


@pytest.mark.parametrize("program", ENDLESS)
def test_waits_that_never_end(program):
    with pytest.raises(tw.TileWeaveError, match=r"T\.barrier_wait: .* forever") as error:
        tw.emit(program, arch="sm_90a", world_size=1)
    assert "test_barrier_phases.py:" in str(error.value)


def test_load_without_a_wait():
    with pytest.raises(tw.TileWeaveError, match=r"no thread waits for the last load .* ready"):
        tw.emit(phase_in_a_variable(1, STEPS, STEPS - 1), world_size=1)


def test_wait_that_never_ends_is_simulated():
    a = np.zeros((STEPS, 64, 64), np.float16)
    with pytest.raises(tw.TileWeaveError, match=r"deadlock(.|\n)*test_barrier_phases\.py:25"):
        tw.simulate(pipeline(phase(2), phase(2), 2), 1, [{"A": a}])


@pytest.mark.parametrize(
    ("program", "after"),
    [
        (one_load(1), "read"),
        (pipeline(phase(1, 1), RIGHT[0][1], 1), "read"),
        (pipeline(phase(2), RIGHT[0][1], 1), "read"),
        (pipeline(phase(2, 1), RIGHT[1][1], 2), "read"),
        (pipeline(phase(1), RIGHT[1][1], 2), "read"),
        (pipeline(phase(1), RIGHT[1][1], 1), "write"),
        (pipeline(phase(1), lambda k: 1, 1), "write"),
    ],
)
def test_waits_for_a_phase_that_is_complete(program, after):
    text = f"a {after} of tile after a write of tile by a bulk load that may .* the wait between"
    with pytest.raises(tw.TileWeaveError, match=text) as error:
        tw.emit(program, arch="sm_90a", world_size=1)
    assert str(error.value).count("test_barrier_phases.py:") == 3
