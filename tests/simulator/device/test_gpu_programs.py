"""Programs of tests/gpu/lowering.py at the device level: what GPUs would find wrong there, too."""

import ml_dtypes
import numpy as np
import pytest

import tileweave as tw
from tests.gpu import lowering

RANKS = 2


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setattr(tw, "world_size", lambda: RANKS)


def small(*shape: int, seed: int) -> np.ndarray:
    """Return -1, 0 and 1 at random: sums of products of these are exact."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("outer", "S", "B", "threads"), [(2, 128, 64, 128), (3, 256, 128, 256)])
def test_accumulators_keep_their_values_across_an_outer_loop(outer, S, B, threads):
    given = [
        {name: small(S, 64, seed=10 * rank + n) for n, name in enumerate("qkv")}
        for rank in range(RANKS)
    ]
    results = tw.validate(lowering.attention(outer, S, B, threads), RANKS, given, "sm_90a")
    for rank, result in enumerate(results):
        q, k, v = given[rank]["q"], given[1 - rank]["k"], given[rank]["v"]
        scores = (q.astype("float32") @ k.astype("float32").T).astype(ml_dtypes.bfloat16)
        right = outer * (scores.astype("float32") @ v.astype("float32"))
        np.testing.assert_array_equal(result["o"], right.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("threads", "H"), [(128, 256), (256, 256)])
def test_products_go_to_the_neighbor(threads, H):
    w = small(H, H, seed=9)
    given = [{"x": small(2, 64, H, seed=rank), "w": w} for rank in range(RANKS)]
    results = tw.validate(lowering.mail(threads, H), RANKS, given, "sm_90a")
    for rank, result in enumerate(results):
        right = given[1 - rank]["x"].astype("float32") @ w.astype("float32")
        np.testing.assert_array_equal(result["y"], right.astype(ml_dtypes.bfloat16))
