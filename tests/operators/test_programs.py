"""The tile programs of the operators on simulated ranks, against NumPy; and that they compile."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import tileweave as tw
from tileweave.ops.all_gather_matmul import all_gather_matmul_plan, gathered_matmul
from tileweave.ops.matmul_reduce_scatter import matmul_reduce_scatter_program
from tileweave.ops.tiles import LARGE, SMALL, Tiles, tiles_for

TILES = Tiles(16, 16, 16, stages=2, threads=32)
EVEN, TAILS = (16, 32, 32), (24, 40, 24)
"""share, N, K: whole tiles, and tails along every axis."""
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
CASES = [
    (1, TAILS, False, "bfloat16"),
    (2, EVEN, True, "float16"),
    (2, TAILS, False, "float16"),
    (3, TAILS, True, "bfloat16"),
    (5, (8, 24, 8), False, "bfloat16"),
    (8, (8, 8, 8), True, "bfloat16"),
]


def numbers(rng, dtype, *shape):
    return rng.integers(-4, 5, shape).astype(DTYPES[dtype])


def exact(a, b):
    return a.astype(np.float32) @ b.astype(np.float32)


@pytest.mark.parametrize(("ranks", "sizes", "transposed", "dtype"), CASES)
def test_matmul_reduce_scatter(ranks, sizes, transposed, dtype):
    share, N, K = sizes
    rng = np.random.default_rng(ranks)
    a = [numbers(rng, dtype, ranks, share, K) for _ in range(ranks)]
    b = [numbers(rng, dtype, K, N) for _ in range(ranks)]
    program = matmul_reduce_scatter_program(share, N, K, ranks, dtype, transposed, TILES)
    inputs = [{"A": x, "B": y.T.copy() if transposed else y} for x, y in zip(a, b, strict=True)]
    outputs = tw.simulate(program, world_size=ranks, inputs=inputs, schedules=2)
    total = sum(exact(x, y) for x, y in zip(a, b, strict=True))
    for rank, output in enumerate(outputs):
        # Parts of small integers are exact in either type.
        assert np.array_equal(output["C"], total[rank].astype(DTYPES[dtype])), rank


@pytest.mark.parametrize(("ranks", "sizes", "transposed", "dtype"), CASES)
def test_all_gather_matmul(ranks, sizes, transposed, dtype):
    share, N, K = sizes
    rng = np.random.default_rng(ranks)
    a = [numbers(rng, dtype, share, K) for _ in range(ranks)]
    b = [numbers(rng, dtype, K, N) for _ in range(ranks)]
    plan = all_gather_matmul_plan(share, N, K, ranks, dtype, transposed, TILES)
    inputs = [{"A": x, "B": y.T.copy() if transposed else y} for x, y in zip(a, b, strict=True)]
    outputs = tw.simulate(plan, world_size=ranks, inputs=inputs, schedules=2)
    for rank, output in enumerate(outputs):
        assert np.array_equal(output["C"], exact(np.stack(a), b[rank]).astype(DTYPES[dtype])), rank


@pytest.mark.parametrize(("tiles", "transposed"), [(LARGE, False), (SMALL, True)])
@pytest.mark.parametrize("make", [matmul_reduce_scatter_program, gathered_matmul])
def test_tails_keep_the_tensor_cores_and_the_tma(make, transposed, tiles):
    """A size that is no multiple of a tile costs a part of a tile, not another kind of code."""
    cuda = tw.emit(make(200, 328, 136, 4, "float16", transposed, tiles))
    assert cuda.count("tl::wgmma_ss<") == 1
    assert cuda.count("tl::tma_load(") == 2
    assert cuda.count("tl::tma_store(") == (1 if make is gathered_matmul else 2)
    assert "cp_async" not in cuda


@pytest.mark.parametrize(
    ("rows", "columns", "shards", "tiles"),
    [(1024, 8192, 4, LARGE), (256, 2048, 4, SMALL), (128, 256, 132, LARGE), (128, 256, 131, SMALL)],
)
def test_tiles(rows, columns, shards, tiles):
    assert tiles_for(rows, columns, shards) == tiles
