"""Pipelined loops whose number of iterations depends on the block."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory


@factory
def rows_of_blocks(
    count, stages, A: T.Tensor((6, 64), "float16"), C: T.Tensor((6, 6, 64), "float16")
):
    with T.Kernel(6, threads=32) as bx:
        tile = T.alloc_shared((64,), "float16")
        for k in T.Pipelined(count(bx), num_stages=stages):
            T.copy(A[k, :], tile)
            T.copy(tile, C[bx, k, :])


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("count", [lambda bx: bx + 1, lambda bx: bx, lambda bx: T.min(bx, 3)])
def test_iterations_of_each_block(count, stages):
    a = np.random.default_rng(0).integers(0, 9, (6, 64)).astype(np.float16)
    (out,) = tw.validate(rows_of_blocks(count, stages), 1, [{"A": a}], "sm_80")
    for block in range(6):
        rows = int(count(block))
        np.testing.assert_array_equal(out["C"][block, :rows], a[:rows])
