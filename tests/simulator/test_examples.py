"""The examples' programs on simulated ranks, in 60 to 200 schedules each, against NumPy."""

import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tileweave as tw
from tests.modules import load_module
from tileweave.simulator import Executable

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
SCHEDULES = 200


def example(name):
    return load_module(EXAMPLES / f"{name}.py")


def every_schedule(program, ranks, inputs, schedules=SCHEDULES, **arguments):
    """Yield the outputs of each schedule."""
    executable = Executable(program, ranks)
    for seed in range(schedules):
        yield tw.simulate(executable, ranks, inputs, seed=seed, **arguments)


def matrices(rng, **shapes):
    return {n: rng.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}


def assert_near(C, exact):
    assert np.linalg.norm(C.astype(np.float32) - exact) < 0.01 * np.linalg.norm(exact)


def gemm_reduce_scatter(ranks, M, N, K, block, **arguments):
    """Yield C of each rank and its expected value, for each schedule."""
    rng = np.random.default_rng(ranks)
    share, k = M // ranks, K // ranks
    tiles = share // block * (N // block)
    inputs = [
        {
            **matrices(rng, A=(M, k), B=(N, k)),
            "arrived": np.zeros((2, tiles), np.uint32),
            "state": np.zeros(2, np.uint32),
        }
        for _ in range(ranks)
    ]
    program = example("gemm_reduce_scatter").gemm_reduce_scatter(M, N, k, ranks, block, block, 16)
    total = sum(i["A"].astype(np.float32) @ i["B"].astype(np.float32).T for i in inputs)
    for out in every_schedule(program, ranks, inputs, **arguments):
        for rank, values in enumerate(out):
            yield values["C"], total[rank * share :][:share]


@pytest.mark.parametrize(
    ("ranks", "resident", "schedules"), [(1, 4, 20), (2, 4, 120), (3, 1, 40), (4, 4, 20)]
)
def test_gemm_reduce_scatter(ranks, resident, schedules):
    """200 schedules in all."""
    M, N, K = 16 * ranks, 32, 16 * ranks
    for C, exact in gemm_reduce_scatter(
        ranks, M, N, K, 16, schedules=schedules, resident_blocks=resident
    ):
        assert_near(C, exact)


def test_cost_of_a_schedule():
    """M = N = K = 512, 4 ranks, 64 x 64 tiles: less than 3 s of this process for each launch."""
    start = time.process_time()
    list(gemm_reduce_scatter(4, 512, 512, 512, 64, schedules=1, epochs=1))
    assert time.process_time() - start < 3


@pytest.mark.parametrize(("ranks", "schedules"), [(1, 20), (2, 120), (3, 40), (4, 20)])
def test_all_gather_gemm(ranks, schedules):
    """200 schedules in all."""
    rng, M, N, K = np.random.default_rng(ranks), 16 * ranks, 32, 16
    share = M // ranks
    inputs = [
        {
            **matrices(rng, A=(share, K), B=(N, K)),
            "ready": np.zeros((2, ranks), np.uint32),
            "epoch": lambda e: e,
        }
        for _ in range(ranks)
    ]
    plan, _ = example("all_gather_gemm").all_gather_gemm(M, N, K, ranks, 16, 16, 16)
    everyones = np.concatenate([i["A"] for i in inputs]).astype(np.float32)
    for out in every_schedule(plan, ranks, inputs, schedules):
        for given, values in zip(inputs, out, strict=True):
            assert_near(values["C"], everyones @ given["B"].astype(np.float32).T)


@pytest.mark.parametrize(("size", "schedules"), [(5, 198), (4100, 2)])
def test_multicast(size, schedules):
    """One rank stores and all ranks receive it, in this iteration of the blocks and after it; 200
    schedules in all."""
    numbers = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    given = {"src": numbers, "dst": np.zeros(size, np.float32), "blocks": 2}
    for (out,) in every_schedule(example("bulk_copy").multicast_program, 1, [given], schedules):
        assert (out["dst"] == numbers).all()


def test_signal_ping_pong():
    inputs = [
        {"flags": np.zeros(1, np.uint32), "start": lambda e: e * 5, "iterations": 5}
        for _ in range(2)
    ]
    for out in every_schedule(example("signal_ping_pong").ping_pong, 2, inputs):
        assert [o["flags"].tolist() for o in out] == [[15], [15]]


def copies(program, size, blocks, schedules):
    src = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    inputs = [{"src": src, "dst": np.zeros(size, np.uint8), "blocks": blocks}]
    for (out,) in every_schedule(program, 1, inputs, schedules):
        assert (out["dst"] == src).all()


@pytest.mark.parametrize("size", [1, 17, 3 * 16384 + 5, 40 * 16384 + 77])
@pytest.mark.parametrize("program", ["bulk_copy_program", "load_store_program"])
def test_bulk_copy_unchanged(size, program):
    copies(getattr(example("bulk_copy"), program), size, 3, schedules=2)


@pytest.mark.parametrize("size", [15, 901])
def test_bulk_copy(size):
    """A small ring; 200 schedules in all."""
    copies(example("bulk_copy").bulk_copy_with(4, 64, 2), size, 2, SCHEDULES // 2)


@pytest.mark.parametrize("size", [15, 901])
def test_load_store(size):
    """200 schedules in all."""
    copies(example("bulk_copy").load_store_program, size, 3, SCHEDULES // 2)
