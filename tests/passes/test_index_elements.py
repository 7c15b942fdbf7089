"""Vectors of tiles that TileLang may permute."""

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.passes.product_of_words import WORDS, N, product_of_words
from tileweave import language as W


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_operands_of_products(arch):
    """TileLang permutes the elements of tiles that tensor cores read."""
    rng = np.random.default_rng(0)
    given = [{"X": rng.integers(-3, 4, (N, N)).astype("float16")} for _ in range(2)]
    program = product_of_words(squares=False)
    out = tw.validate(program, 2, given, arch=arch, epochs=2, pass_configs=WORDS)
    for rank in range(2):
        x, y = (given[r]["X"].astype(np.float32) for r in (rank, 1 - rank))
        np.testing.assert_array_equal(out[rank]["Y"], x @ y.T)


def test_vectors_with_gaps():
    @T.prim_func
    def program(
        X: T.Tensor((8, N), "float32"), Y: T.Tensor((8, N), "float32"),
        Z: T.Tensor((8, N), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((8, N), "float32")
            W.fence("gpu")
            for i, j in T.Parallel(8, N // 2):
                tile[i, T.Ramp(j, N // 2, 2)] = X[i, T.Ramp(j, N // 2, 2)]
            for i, j in T.Parallel(8, N // 2):
                Z[i, T.Ramp(2 * j, 1, 2)] = tile[i, T.Ramp(j, N // 2, 2)]
            T.copy(tile, Y)

    x = np.random.default_rng(0).standard_normal((8, N)).astype(np.float32)
    (out,) = tw.validate(program, 1, [{"X": x}])
    np.testing.assert_array_equal(out["Y"], x)
    np.testing.assert_array_equal(out["Z"], x.reshape(8, 2, N // 2).swapaxes(1, 2).reshape(8, N))
