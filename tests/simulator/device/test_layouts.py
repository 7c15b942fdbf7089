"""Tensors in global memory that a kernel stores in another order (``T.annotate_layout``)."""

import numpy as np
import pytest
import tilelang.language as T
from tilelang.layout import Layout, make_swizzled_layout

import tileweave as tw
from tests.factory import factory

X, Y = T.Tensor((64, 64), "float16"), T.Tensor((64, 64), "float16")
LAYOUTS = {
    "swizzled": make_swizzled_layout,
    "transposed": lambda tensor: Layout(tensor.shape, lambda i, j: (j, i)),
    "blocks": lambda tensor: Layout(tensor.shape, lambda i, j: (i // 8, j // 8, i % 8, j % 8)),
}


@factory
def stored(layout, by_tma, A: X, B: Y):
    with T.Kernel(1, threads=128):
        T.annotate_layout({B: LAYOUTS[layout](B)})
        tile = T.alloc_shared((64, 64), "float16")
        T.copy(A, tile)
        if by_tma:
            T.copy(tile, B)
        else:
            for i, j in T.Parallel(64, 64):
                B[i, j] = tile[i, j] + A[i, j]


@factory
def loaded(layout, A: X, B: Y):
    with T.Kernel(1, threads=128):
        T.annotate_layout({A: LAYOUTS[layout](A)})
        for i, j in T.Parallel(64, 64):
            B[i, j] = 2 * A[i, j]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_layouts_of_tensors(layout, arch):
    a = np.random.default_rng(0).integers(0, 99, (64, 64)).astype(np.float16)
    for program in (stored(layout, False), loaded(layout)):
        (out,) = tw.validate(program, 1, [{"A": a}], arch)
        np.testing.assert_array_equal(out["B"], 2 * a)


def test_the_tma_ignores_the_layout():
    tw.emit(stored("transposed", True), arch="sm_80", world_size=1)
    with pytest.raises(tw.TileWeaveError, match=r"T.copy: TileLang accesses other elements of"):
        tw.validate(stored("transposed", True), 1, [{"A": np.ones((64, 64), np.float16)}])
