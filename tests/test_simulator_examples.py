"""The examples' programs on simulated ranks, against NumPy."""

import importlib.util
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tileweave as tw

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gemm_reduce_scatter(ranks, M, N, K, block, **arguments):
    """Each rank's C and what it must be."""
    rng = np.random.default_rng(ranks)
    share, k = M // ranks, K // ranks
    tiles = share // block * (N // block)
    inputs = [
        {
            "A": rng.standard_normal((M, k)).astype(ml_dtypes.bfloat16),
            "B": rng.standard_normal((N, k)).astype(ml_dtypes.bfloat16),
            "arrived": np.zeros((2, tiles), np.uint32),
            "state": np.zeros(2, np.uint32),
        }
        for _ in range(ranks)
    ]
    program = example("gemm_reduce_scatter").gemm_reduce_scatter(M, N, k, ranks, block, block, 16)
    out = tw.simulate(program, ranks, inputs, **arguments)
    total = sum(i["A"].astype(np.float32) @ i["B"].astype(np.float32).T for i in inputs)
    return [(o["C"].astype(np.float32), total[r * share :][:share]) for r, o in enumerate(out)]


@pytest.mark.parametrize(("ranks", "resident"), [(1, 4), (2, 4), (3, 1), (4, 4)])
def test_gemm_reduce_scatter(ranks, resident):
    for C, expected in gemm_reduce_scatter(
        ranks, 64 * ranks, 64, 32 * ranks, 32, schedules=10, resident_blocks=resident
    ):
        assert np.linalg.norm(C - expected) < 0.01 * np.linalg.norm(expected)


def test_cost_of_a_schedule():
    """M = N = K = 512, 4 ranks, 64 x 64 tiles: less than 3 s for each launch."""
    start = time.perf_counter()
    gemm_reduce_scatter(4, 512, 512, 512, 64, epochs=1)
    assert time.perf_counter() - start < 3


def test_signal_ping_pong():
    inputs = [
        {"flags": np.zeros(1, np.uint32), "start": lambda e: e * 5, "rounds": 5} for _ in range(2)
    ]
    out = tw.simulate(example("signal_ping_pong").ping_pong, 2, inputs, schedules=10)
    assert [o["flags"].tolist() for o in out] == [[15], [15]]


@pytest.mark.parametrize("size", [1, 17, 3 * 16384 + 5, 40 * 16384 + 77])
@pytest.mark.parametrize("program", ["bulk_copy_program", "load_store_program"])
def test_bulk_copy(size, program):
    src = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    inputs = [{"src": src, "dst": np.zeros(size, np.uint8), "blocks": 3}]
    out = tw.simulate(getattr(example("bulk_copy"), program), 1, inputs, schedules=2)
    assert (out[0]["dst"] == src).all()
