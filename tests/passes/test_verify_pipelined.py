"""Waits of pipelined loops that the warps of a role load themselves."""

import numpy as np
import pytest

import tileweave as tw
from tests.passes.second_loop import STEPS, N, second_loop


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_second_loop_loads_from_a_peer(num_stages):
    rng = np.random.default_rng(num_stages)
    A = [rng.integers(0, 4, (STEPS, N, N)).astype(np.float16) for _ in range(2)]
    sums = [a.astype(np.float32).sum(0) for a in A]
    factors = np.arange(1, STEPS + 1)
    outputs = tw.validate(second_loop(num_stages), 2, [{"A": a} for a in A], epochs=2)
    for rank, given in enumerate(outputs):
        right = sums[rank] + factors.sum() * sums[1 - rank] + (factors * (factors - 1)).sum()
        assert np.array_equal(given["out"], right)
