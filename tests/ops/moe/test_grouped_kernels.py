"""Tile programs of the grouped GEMM, in the simulator at both levels, and their machine code."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tileweave.ops.core.tiles import SHARED_BYTES, Tiles
from tileweave.ops.moe.kernels.grouped_gemm import (
    GROUPED,
    GROUPED_FEW_ROWS,
    GROUPED_FP8,
    GROUPED_FP8_FEW_ROWS,
    MOST_EXPERTS,
    GroupedConfig,
    count_tiles,
    find_tile,
    grouped_gemm,
    numbers_of,
)
from tileweave.ops.moe.kernels.grouped_wgrad import grouped_wgrad

BF16 = ml_dtypes.bfloat16
SMALL = Tiles(64, 64, 32, stages=2, threads=128, group_m=2)
N, K = 72, 136
UNUSED = -7
COUNTS = {
    "no rows": [0, 0, 0],
    "one row": [1, 0, 0],
    "one tile": [0, 64, 0],
    "all in one": [0, 0, 150],
    "tails": [63, 65, 1],
    "mixed": [128, 0, 70],
}
"""Rows of each expert. All have the same number of experts, so that programs are compiled once."""
ROWS = 200
"""Rows of x, more than those of all experts."""
BOTH = ["tile", pytest.param("device", marks=pytest.mark.long)]


def run(program, inputs, level="tile", **options):
    (outputs,) = tw.simulate(program, 1, [inputs], level=level, epochs=1, **options)
    return outputs


def offsets_of(counts):
    return np.cumsum(counts).astype(np.int32)


def tiles_of(counts, rows):
    """Return the list of tiles by definition."""
    ends = [0, *offsets_of(counts)]
    return [
        (row, end, expert)
        for expert, (begin, end) in enumerate(pairwise(ends))
        for row in range(begin, end, rows)
    ]


@cache
def tiles_program(experts, tile_rows, threads=384):
    """List the row tiles that the blocks of a grouped GEMM find, and their number."""
    tiles_of_rows = Tiles(tile_rows, 64, 32, stages=2, group_m=2)

    @T.prim_func
    def list_tiles(
        offsets: T.Tensor((experts,), "int32"),
        rows: T.int32,
        tiles: T.Tensor((MAX_TILES, 3), "int32"),
        number: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=threads):
            before = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            scratch = T.alloc_shared((numbers_of(experts),), "int32", scope="shared")
            count_tiles(offsets, rows, tile_rows, before, scratch)
            for i in T.serial(MAX_TILES):
                if i < before[experts]:
                    row, end, expert, _ = find_tile(offsets, rows, tiles_of_rows, 1, before, i)
                    tiles[i, 0] = row
                    tiles[i, 1] = end
                    tiles[i, 2] = expert
            number[0] = before[experts]

    return list_tiles


MAX_TILES = 300


def list_tiles(offsets, rows, tile_rows=64, level="tile"):
    """Return the row tiles that blocks find."""
    inputs = {
        "offsets": np.asarray(offsets, np.int32),
        "rows": rows,
        "tiles": np.full((MAX_TILES, 3), UNUSED, np.int32),
    }
    outputs = run(tiles_program(len(offsets), tile_rows), inputs, level)
    return outputs["tiles"][: outputs["number"][0]].tolist()


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_tiles(counts, level):
    tiles = list_tiles(offsets_of(counts), ROWS, level=level)
    assert tiles == [list(tile) for tile in tiles_of(counts, 64)]


def test_tiles_at_both_levels():
    tiles = np.zeros((MAX_TILES, 3), np.int32)
    inputs = {"offsets": offsets_of([63, 65, 1]), "rows": ROWS, "tiles": tiles}
    (outputs,) = tw.validate(tiles_program(3, 64), 1, [inputs])
    assert outputs["tiles"][: outputs["number"][0]].tolist() == [
        list(tile) for tile in tiles_of([63, 65, 1], 64)
    ]


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("experts", [1, 31, 32, 150, MOST_EXPERTS])
def test_tiles_of_many_experts(experts, level):
    counts = np.random.default_rng(0).integers(0, 3, experts)
    counts[experts // 2] = 5
    tiles = list_tiles(offsets_of(counts), int(counts.sum()), 4, level)
    assert tiles == [list(tile) for tile in tiles_of(counts, 4)]


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("seed", range(4))
def test_invalid_offsets_stay_within_rows(seed, level):
    rows = 100
    offsets = np.random.default_rng(seed).integers(-50, 300, 9)
    tiles = list_tiles(offsets, rows, 16, level)
    assert tiles
    row, end, expert = np.array(tiles).T
    assert (row >= 0).all() and (row < end).all() and (end <= rows).all()
    assert (expert >= 0).all() and (expert < len(offsets)).all()


def integers(rng, *shape):
    return rng.integers(-4, 5, shape).astype(BF16)


def products_of(x, w, counts):
    """Return the exact products of the rows of experts; other rows are 0."""
    products = np.zeros((len(x), w.shape[1]))
    for weight, (begin, end) in zip(w, pairwise([0, *offsets_of(counts)]), strict=True):
        products[begin:end] = x[begin:end].astype(float) @ weight.astype(float).T
    return products


@cache
def gemm(transposed, dtype="bfloat16"):
    return grouped_gemm(GroupedConfig(3, N, K, dtype, transposed, SMALL, blocks=3))


@cache
def wgrad():
    return grouped_wgrad(GroupedConfig(3, N, K, "bfloat16", True, SMALL, blocks=3))


def operands(counts, transposed):
    """Return x, w and the product. Rows that no expert has are NaN."""
    rng = np.random.default_rng(0)
    x, w = integers(rng, ROWS, K), integers(rng, 3, N, K)
    expected = products_of(x, w, counts)
    x[sum(counts) :] = np.nan
    return x, w if transposed else w.swapaxes(1, 2).copy(), expected.astype(BF16)


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("transposed", [True, False], ids=["(E, N, K)", "(E, K, N)"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_gemm(counts, transposed, level):
    x, w, expected = operands(counts, transposed)
    inputs = {"X": x, "W": w, "offsets": offsets_of(counts), "Y": np.ones((ROWS, N), BF16)}
    y = run(gemm(transposed), inputs, level, schedules=2)["Y"]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    "transposed",
    [
        pytest.param(True, id="(E, N, K)"),
        pytest.param(False, id="(E, K, N)", marks=pytest.mark.long),
    ],
)
def test_gemm_at_both_levels(transposed):
    x, w, expected = operands([64, 0, 33], transposed)
    inputs = {"X": x, "W": w, "offsets": offsets_of([64, 0, 33])}
    (outputs,) = tw.validate(gemm(transposed), 1, [inputs])
    np.testing.assert_array_equal(outputs["Y"], expected)


def test_rest_is_not_written():
    x, w, expected = operands([64, 0, 33], True)
    config = GroupedConfig(3, N, K, "bfloat16", True, SMALL, blocks=3, clear_rest=False)
    inputs = {"X": x, "W": w, "offsets": offsets_of([64, 0, 33]), "Y": np.ones((ROWS, N), BF16)}
    y = run(grouped_gemm(config), inputs)["Y"]
    np.testing.assert_array_equal(y[:97], expected[:97])
    assert (y[97:] == 1).all()


def test_gemm_of_fp16():
    x, w, expected = operands([64, 0, 33], True)
    x, w = x.astype(np.float16), w.astype(np.float16)
    inputs = {"X": x, "W": w, "offsets": offsets_of([64, 0, 33])}
    y = run(gemm(True, "float16"), inputs)["Y"]
    np.testing.assert_array_equal(y.astype(BF16), expected)


FP8_TILES = Tiles(64, 64, 128, stages=2, threads=128, group_m=2)


@pytest.mark.parametrize("scales", ["tensor", "block"])
def test_gemm_of_fp8(scales):
    """Scales are powers of two, so that sums are exact."""
    n, k, counts, rng = 144, 272, [64, 0, 33], np.random.default_rng(0)
    config = GroupedConfig(3, n, k, "float8_e4m3fn", True, FP8_TILES, 3, scales, "bfloat16")
    x = rng.integers(-2, 3, (ROWS, k)).astype(ml_dtypes.float8_e4m3fn)
    w = rng.integers(-2, 3, (3, n, k)).astype(ml_dtypes.float8_e4m3fn)
    is_block = scales == "block"
    scale_x = 2.0 ** rng.integers(-2, 3, (ROWS, 3) if is_block else (1,))
    scale_w = 2.0 ** rng.integers(-2, 3, (3, 2, 3) if is_block else (3,))
    if is_block:
        x_wide = x.astype(float) * scale_x.repeat(128, 1)[:, :k]
        w_wide = w.astype(float) * scale_w.repeat(128, 1)[:, :n].repeat(128, 2)[..., :k]
    else:
        x_wide, w_wide = x.astype(float) * scale_x, w.astype(float) * scale_w[:, None, None]
    expected = products_of(x_wide, w_wide, counts)
    inputs = {"X": x, "W": w, "offsets": offsets_of(counts)}
    inputs |= {"scale_x": scale_x.astype(np.float32), "scale_w": scale_w.astype(np.float32)}
    (outputs,) = tw.validate(grouped_gemm(config), 1, [inputs])
    np.testing.assert_array_equal(outputs["Y"], expected.astype(BF16))


EPILOGUES = {
    "swiglu": {"epilogue": "swiglu"},
    "swiglu, bias, weights": {"epilogue": "swiglu", "biased": True, "weighted": True},
    "bias, weights": {"biased": True, "weighted": True},
}


def of_epilogue(rng, products, offsets, options, dtype=BF16):
    """Return the bias and the weights of rows that a kernel declares, and the exact result."""
    (rows, n), inputs = products.shape, {}
    if options.get("biased"):
        inputs["bias"] = bias = rng.integers(-4, 5, (3, n)).astype(dtype)
        for of_expert, (begin, end) in zip(bias, pairwise([0, *offsets]), strict=True):
            products[begin:end] += of_expert.astype(float)
    if options.get("epilogue"):
        gate, up = products[:, : n // 2], products[:, n // 2 :]
        products = gate / (1 + np.exp(-gate)) * up
    if options.get("weighted"):
        inputs["row_weights"] = rng.random(rows).astype(np.float32)
        products = products * inputs["row_weights"][:, None]
    return inputs, products


LONG = {"marks": pytest.mark.long}


@pytest.mark.parametrize(
    ("transposed", "options"),
    [
        (True, "swiglu, bias, weights"),
        pytest.param(True, "bias, weights", **LONG),
        pytest.param(False, "swiglu", **LONG),
        pytest.param(False, "swiglu, bias, weights", **LONG),
    ],
)
def test_epilogues(transposed, options):
    """Gate and up have 40 columns, so that a tile of gate also has columns of up. The TMA swizzles
    whole 64 columns of (E, K, N) weights."""
    n, counts, rng, options = 80, [64, 0, 33], np.random.default_rng(0), EPILOGUES[options]
    tiles = SMALL if transposed else replace(SMALL, N=128)
    config = GroupedConfig(3, n, K, "bfloat16", transposed, tiles, blocks=3, **options)
    x, w = (rng.integers(-2, 3, shape) / 4 for shape in ((ROWS, K), (3, n, K)))
    products, offsets = products_of(x, w, counts), offsets_of(counts)
    inputs, expected = of_epilogue(rng, products, offsets, options)
    x[sum(counts) :] = np.nan
    inputs |= {"X": x.astype(BF16), "offsets": offsets}
    inputs["W"] = (w if transposed else w.swapaxes(1, 2).copy()).astype(BF16)
    (outputs,) = tw.validate(grouped_gemm(config), 1, [inputs])
    y = outputs["Y"].astype(float)
    np.testing.assert_allclose(y[:97], expected[:97], rtol=2**-8, atol=1e-30)
    assert not y[97:].any()


@pytest.mark.parametrize("scales", ["block", pytest.param("tensor", marks=pytest.mark.long)])
def test_fp8_epilogue(scales):
    n, k, counts, rng = 256, 144, [64, 0, 33], np.random.default_rng(0)
    options, is_block = EPILOGUES["swiglu, bias, weights"], scales == "block"
    config = GroupedConfig(
        3, n, k, "float8_e4m3fn", True, FP8_TILES, 3, scales, "float16", **options
    )
    x, w = rng.integers(-2, 3, (ROWS, k)), rng.integers(-2, 3, (3, n, k))
    scale_x = 2.0 ** rng.integers(-4, -1, (ROWS, 2) if is_block else (1,))
    scale_w = 2.0 ** rng.integers(-4, -1, (3, 2, 2) if is_block else (3,))
    x_wide = x * (scale_x.repeat(128, 1)[:, :k] if is_block else scale_x)
    by_row = scale_w.repeat(128, 1).repeat(128, 2)[..., :k] if is_block else scale_w[:, None, None]
    products, offsets = products_of(x_wide, w * by_row, counts), offsets_of(counts)
    inputs, expected = of_epilogue(rng, products, offsets, options, np.float16)
    inputs |= {name: a.astype(ml_dtypes.float8_e4m3fn) for name, a in (("X", x), ("W", w))}
    inputs |= {"scale_x": scale_x.astype(np.float32), "scale_w": scale_w.astype(np.float32)}
    (outputs,) = tw.validate(grouped_gemm(config), 1, [inputs | {"offsets": offsets}])
    y = outputs["Y"].astype(float)
    np.testing.assert_allclose(y[:97], expected[:97], rtol=2**-10, atol=1e-6)
    assert not y[97:].any()


@pytest.mark.parametrize("level", BOTH)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_wgrad(counts, level):
    """Rows of other experts do not contribute, also if they are NaN."""
    rng = np.random.default_rng(0)
    x, grad, offsets = integers(rng, ROWS, K), integers(rng, ROWS, N), offsets_of(counts)
    expected = np.stack([
        grad[begin:end].astype(float).T @ x[begin:end].astype(float)
        for begin, end in pairwise([0, *offsets])
    ]).astype(BF16)  # fmt: skip
    x[sum(counts) :] = grad[sum(counts) :] = np.nan
    inputs = {"dY": grad, "X": x, "offsets": offsets, "dW": np.ones((3, N, K), BF16)}
    np.testing.assert_array_equal(run(wgrad(), inputs, level, schedules=2)["dW"], expected)


@pytest.mark.long
def test_wgrad_does_not_read_nan_of_the_next_expert():
    counts = [33, 40, 0]
    rng = np.random.default_rng(0)
    x, grad = integers(rng, ROWS, K), integers(rng, ROWS, N)
    expected = (grad[:33].astype(float).T @ x[:33].astype(float)).astype(BF16)
    x[33:] = grad[33:] = np.nan
    inputs = {"dY": grad, "X": x, "offsets": offsets_of(counts)}
    (outputs,) = tw.validate(wgrad(), 1, [inputs])
    np.testing.assert_array_equal(outputs["dW"][0], expected)
    assert np.isnan(outputs["dW"][1].astype(float)).all() and not outputs["dW"][2].any()


@pytest.mark.long
@pytest.mark.parametrize("tiles", [GROUPED, GROUPED_FEW_ROWS], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_gemm_spills_no_registers(ptxas, transposed, tiles):
    config = GroupedConfig(MOST_EXPERTS, 4096, 7168, "bfloat16", transposed, tiles)
    report = ptxas(tw.emit(grouped_gemm(config), "ptx", world_size=1))
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    (fixed,) = re.findall(r"(\d+) bytes smem", report)
    assert int(fixed) + 2 * (tiles.M + tiles.N) * tiles.K * tiles.stages <= SHARED_BYTES


@pytest.mark.long
@pytest.mark.parametrize("options", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize("tiles", [GROUPED, GROUPED_FEW_ROWS], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_epilogues_spill_no_registers(ptxas, transposed, tiles, options):
    config = GroupedConfig(32, 4096, 7168, "bfloat16", transposed, tiles, **options)
    report = ptxas(tw.emit(grouped_gemm(config), "ptx", world_size=1))
    assert "0 bytes spill stores, 0 bytes spill loads" in report


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, *EPILOGUES.values()], ids=["plain", *EPILOGUES])
@pytest.mark.parametrize("scales", ["tensor", "block"])
@pytest.mark.parametrize("tiles", [GROUPED_FP8, GROUPED_FP8_FEW_ROWS], ids=str)
def test_fp8_spills_no_sums(ptxas, tiles, scales, options):
    """A few addresses of the loop over tiles may spill, but no sums."""
    config = GroupedConfig(
        32, 4096, 7168, "float8_e4m3fn", True, tiles, scales=scales, out_dtype="bfloat16",
        **options,
    )  # fmt: skip
    report = ptxas(tw.emit(grouped_gemm(config), "ptx", world_size=1))
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    assert int(spilled) <= 64


@pytest.mark.long
def test_wgrad_spills_no_registers(ptxas):
    report = ptxas(
        tw.emit(grouped_wgrad(GroupedConfig(32, 4096, 7168, "bfloat16", True)), "ptx", world_size=1)
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in report
