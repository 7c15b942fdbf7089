"""Predictions of the cost model, against measurements on 2 and 4 H200.

benchmarks/LOG.md has the measurements, from 2026-11-22 on.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tileweave import language as W
from tileweave.ops.autotune.trial import problem_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.core.tiles import (
    FP8,
    LARGE,
    PERSISTENT_TILES,
    SMALL,
    PersistentSchedule,
    Tiles,
    stores_last_peer,
)
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.cost_model import (
    estimate_ag_gemm_comm_blocks_us,
    estimate_ag_gemm_copy_engine_us,
    estimate_gemm_rs_persistent_us,
    estimate_gemm_rs_store_us,
    estimate_tile_us,
)
from tileweave.ops.gemm.gemm_operator import GemmOperator

ROWS = 1024, 2048, 4096, 8192, 16384
GATHERED = {
    (28672, 8192): (203, 325, 628, 1259, 2528),
    (14336, 4096): (None, 113, 170, None, 646),
    (53248, 16384): (655, None, 2301, 4641, 9572),
}
SUMMED = {
    (8192, 28672): (None, 327, 639, 1279, 2567),
    (4096, 14336): (None, None, 177, 342, 681),
    (16384, 53248): (631, 1196, 2356, 4727, 9786),
    (8192, 29568): (None, 346, 681, 1364, 2737),
}
SHARED = {
    (8192, 28672): (None, 424, 783, 1480, 2858),
    (16384, 53248): (None, 1381, 2646, 5193, 10415),
    (8192, 29568): (None, 445, 818, 1544, 2989),
}
"""us of 4 ranks, in tiles of 128 x 256, but where all-gathers took 224 columns; by (N, K) of all
ranks. None where that was not measured, or with another program than there is now."""
BY_KERNELS = {4096: 344, 8192: 670, 16384: 1420}
"""us of 4 ranks, of x 4096 x 14336, where copies waited for kernels that waited."""
FETCHED = {
    (512, 8192, 7168): 124, (1024, 8192, 7168): 203, (2048, 8192, 7168): 353,
    (4096, 8192, 7168): 680, (1024, 4096, 3584): 82, (2048, 4096, 3584): 122,
    (4096, 4096, 3584): 207, (8192, 4096, 3584): 375,
}  # fmt: skip
"""us of 2 ranks, what is summed for all as the table cuts it, the last chunk fetched by blocks; by
M, N and a rank's K."""
BETWEEN_TWO = {
    (2048, 8192, 7168): (317, {(4, 1): 358, (8, 1): 370, (8, 2): 353, (8, 4): 362, (16, 1): 370}),
    (4096, 8192, 7168): (634, {(4, 1): 689, (8, 1): 697, (8, 2): 679, (8, 4): 696, (16, 1): 760}),
}
"""us of 2 ranks, what is summed, and what is summed for all in bands of so many rows of tiles in so
many chunks; by M, N and a rank's K."""
COMMUNICATED = [
    (4, 256, 3584, 4096, 72, 55), (4, 512, 3584, 4096, 109, 106), (4, 128, 3584, 4096, 60, 42),
    (4, 256, 7168, 8192, 191, 189), (4, 256, 7392, 8192, 192, 191), (4, 128, 7168, 8192, 148, 107),
    (8, 128, 3584, 8192, 164, 111), (8, 256, 3584, 8192, 236, 202),
    (2, 512, 3584, 4096, 56, 55), (2, 1024, 3584, 4096, 87, 96), (2, 512, 7168, 8192, 164, 179),
]  # fmt: skip
"""Ranks, rows of each, N, K, and us in the best tiles by copy engines and by blocks; of 2 ranks,
each of which stands for all others."""
NARROW = {(28672, 1024), (28672, 2048), (14336, 2048), (14336, 4096), (53248, 1024)}
BAND_OF_4 = Tiles(128, 256, 64, stages=4, group_m=4)


def measured(table):
    return [
        pytest.param(M, N, K, us, id=f"{M}x{N}x{K}")
        for (N, K), times in table.items()
        for M, us in zip(ROWS, times, strict=True)
        if us
    ]


@pytest.mark.parametrize(("M", "N", "K", "us"), measured(GATHERED))
def test_what_is_gathered(M, N, K, us):
    tiles = PERSISTENT_TILES[1] if (N, M) in NARROW else PERSISTENT_TILES[0]
    assert estimate_ag_gemm_copy_engine_us(M // 4, N // 4, K, 4, tiles) == pytest.approx(
        us, rel=0.06
    )


@pytest.mark.parametrize(
    ("M", "N", "K", "columns", "whole", "chunks", "taken"),
    [(512, 7168, 8192, 224, 118, 109, 4), (1024, 7168, 8192, 224, 167, 167, 1)],
)
def test_rows_in_chunks(M, N, K, columns, whole, chunks, taken):
    """Between 2 ranks, blocks start with a peer's rows if there are too few own ones."""
    tiles = next(tiles for tiles in PERSISTENT_TILES if tiles.N == columns)
    actual = [
        estimate_ag_gemm_copy_engine_us(M // 2, N, K, 2, replace(tiles, num_chunks=cut))
        for cut in (1, 4)
    ]
    assert actual == pytest.approx((whole, chunks), rel=0.05)
    problem = problem_of("all_gather_matmul", M, 2 * N, K, 2, torch.bfloat16)
    options = OPERATORS["all_gather_matmul"].options(problem).items()
    copied = {choice: us for choice, us in options if choice.program == "copy_engines"}
    assert min(copied, key=copied.get).tiles.num_chunks == taken


@pytest.mark.parametrize(("ranks", "share", "N", "K", "copied", "sent"), COMMUNICATED)
def test_some_blocks_communicate(ranks, share, N, K, copied, sent):
    """Blocks communicate if copies to many ranks start late; otherwise copy engines do."""
    predicted = min(
        estimate_ag_gemm_comm_blocks_us(share, N, K, ranks, tiles) for tiles in PERSISTENT_TILES
    )
    assert predicted == pytest.approx(sent, rel=0.08)
    problem = problem_of("all_gather_matmul", ranks * share, ranks * N, K, ranks, torch.bfloat16)
    taken = OPERATORS["all_gather_matmul"].table(problem).program
    near = abs(sent - copied) < 0.05 * copied
    assert near or taken == ("communicating_blocks" if sent < copied else "copy_engines")


@pytest.mark.parametrize(("M", "N", "K", "us"), measured(SUMMED))
def test_what_is_summed(M, N, K, us):
    expected = estimate_gemm_rs_persistent_us(M // 4, N, K // 4, 4, PERSISTENT_TILES[0])
    assert expected == pytest.approx(us, rel=0.06 if us > 150 else 0.18)


@pytest.mark.parametrize(("M", "N", "K", "us"), measured(SHARED))
def test_what_is_summed_for_all(M, N, K, us):
    assert estimate_gemm_rs_persistent_us(
        M // 4, N, K // 4, 4, BAND_OF_4, shared=True
    ) == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(("M", "us"), BY_KERNELS.items())
def test_streams_wait_sooner_than_kernels(M, us):
    assert (
        0.5 * us
        < estimate_gemm_rs_persistent_us(M // 4, 4096, 3584, 4, BAND_OF_4, shared=True)
        < 0.9 * us
    )


@pytest.mark.parametrize(("M", "N", "K"), BETWEEN_TWO)
def test_chunks(M, N, K):
    """The model predicts the fastest number of chunks, too."""
    summed, shared = BETWEEN_TWO[M, N, K]
    share, tiles = M // 2, PERSISTENT_TILES[0]
    alone = estimate_gemm_rs_persistent_us(share, N, K, 2, tiles)
    assert alone == pytest.approx(summed, rel=0.04 if M > 2048 else 0.05)
    predicted = {
        (band, cut): estimate_gemm_rs_persistent_us(
            share, N, K, 2, replace(tiles, group_m=band, num_chunks=cut), shared=True
        )
        for band, cut in shared
    }  # fmt: skip
    more = {way: us / alone for way, us in predicted.items()}
    assert more == pytest.approx({way: us / summed for way, us in shared.items()}, rel=0.03)
    assert min(predicted, key=predicted.get) == min(shared, key=shared.get)


@pytest.mark.parametrize(("shape", "us"), FETCHED.items())
def test_sums_are_fetched(shape, us):
    M, N, K = shape
    problem = problem_of("matmul_all_reduce", M, N, 2 * K, 2, torch.bfloat16)
    estimates = OPERATORS["matmul_all_reduce"].estimates(problem)
    predicted = min(t for c, t in estimates.items() if c.program == "copy_engines")
    assert predicted == pytest.approx(us, rel=0.045)


@pytest.mark.parametrize(
    ("M", "N", "K", "summed", "shared"), [(512, 8192, 7168, 104, 124), (1024, 4096, 3584, 65, 82)]
)
def test_what_is_late(M, N, K, summed, shared):
    """SMs store what copy engines would deliver after the last product: 10 us less with 2 ranks."""
    assert stores_last_peer(M // 2, N, 2, PERSISTENT_TILES[0])
    assert estimate_gemm_rs_persistent_us(M // 2, N, K, 2, PERSISTENT_TILES[0]) == pytest.approx(
        summed, rel=0.02
    )
    actual = estimate_gemm_rs_persistent_us(M // 2, N, K, 2, PERSISTENT_TILES[0], shared=True)
    assert actual == pytest.approx(shared, rel=0.1)


@pytest.mark.parametrize(
    ("M", "N", "K", "large", "small"),
    [(1024, 4096, 3584, 73, 75), (2048, 4096, 3584, 128, 134), (1024, 8192, 7168, 203, 229),
     (2048, 8192, 7168, 376, 420)],
)  # fmt: skip
def test_what_is_stored(M, N, K, large, small):
    assert estimate_gemm_rs_store_us(M // 4, N, K, 4, LARGE) == pytest.approx(large, rel=0.09)
    shallow = Tiles(128, 128, 64, stages=4)
    assert estimate_gemm_rs_store_us(M // 4, N, K, 4, shallow) == pytest.approx(small, rel=0.09)


@pytest.mark.parametrize(
    ("op", "shape", "program", "columns", "band", "cut"),
    [
        ("all_gather_matmul", (4096, 28672, 8192), "copy_engines", 256, 8, 1),
        ("all_gather_matmul", (1024, 14336, 4096), "communicating_blocks", 256, 8, 1),
        ("all_gather_matmul", (4096, 29568, 8192), "copy_engines", 224, 8, 4),
        ("matmul_reduce_scatter", (1024, 4096, 14336), "one_shot", 256, 8, 1),
        ("matmul_reduce_scatter", (1024, 8192, 28672), "copy_engines", 256, 8, 1),
        ("matmul_all_reduce", (1024, 4096, 14336), "two_shot", 128, 8, 1),
        ("matmul_all_reduce", (2048, 4096, 14336), "copy_engines", 256, 8, 1),
        ("matmul_all_reduce", (8192, 4096, 14336), "copy_engines", 256, 8, 1),
        ("matmul_all_reduce", (8192, 8192, 28672), "copy_engines", 256, 8, 4),
        ("matmul_all_reduce", (8192, 16384, 53248), "copy_engines", 256, 8, 4),
    ],
)
def test_what_the_table_takes(op, shape, program, columns, band, cut):
    choice = OPERATORS[op].table(problem_of(op, *shape, 4, torch.bfloat16))
    actual = choice.program, choice.tiles.N, choice.tiles.group_m, choice.tiles.num_chunks
    assert actual == (program, columns, band, cut)


FEW_ROWS = {
    ("matmul_reduce_scatter", 8192, 14336):
        {16: (47, 42), 64: (42, 46), 128: (44, 51), 256: (58, 72), 512: (102, 118)},
    ("matmul_reduce_scatter", 4096, 7168):
        {16: (25, 23), 64: (21, 24), 128: (22, 28), 256: (28, 35), 512: (40, 52), 1024: (63, 79)},
    ("matmul_all_reduce", 8192, 14336):
        {16: (51, 43), 64: (43, 50), 128: (46, 69), 256: (66, 84), 512: (116, 135)},
    ("matmul_all_reduce", 4096, 7168):
        {16: (26, 25), 64: (21, 26), 128: (23, 31), 256: (30, 52), 512: (45, 63), 1024: (77, 95)},
    ("all_gather_matmul", 14336, 8192):
        {16: (49, 47), 64: (44, 48), 128: (45, 56), 256: (61, 74)},
    ("all_gather_matmul", 7168, 4096): {16: (25, 24), 64: (21, 24), 128: (22, 27), 256: (29, 37)},
}  # fmt: skip
"""Fused, and by NCCL and cuBLAS, in us, of 2 ranks."""


@pytest.mark.parametrize(
    ("op", "M", "N", "K", "fused", "nccl"),
    [(op, M, N, K, *us) for (op, N, K), rows in FEW_ROWS.items() for M, us in rows.items()],
)
def test_few_rows(op, M, N, K, fused, nccl):
    """The model chooses the faster program."""
    problem = problem_of(op, M, N, K, 2, torch.bfloat16)
    assert OPERATORS[op].predicted(problem) == pytest.approx((fused, nccl), rel=0.2)
    taken = gemm_operator.predicted_strategy(problem, is_captured=True).name
    assert {"fused": fused, "nccl": nccl}[taken] == min(fused, nccl)


def test_the_host_needs_time_for_nccl_without_a_graph():
    for N, K, eager in ((7168, 4096, "fused"), (14336, 8192, "nccl")):
        problem = problem_of("all_gather_matmul", 16, N, K, 2, torch.bfloat16)
        assert gemm_operator.predicted_strategy(problem, is_captured=True).name == "nccl"
        assert gemm_operator.predicted_strategy(problem).name == eager


@pytest.mark.parametrize("op", operators_of(GemmOperator))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("ranks", "shape"), [(1, (8, 8, 8)), (3, (3, 24, 48)), (8, (8000, 8, 16))])
def test_something_is_taken_of_all(op, dtype, ranks, shape):
    """All sizes have a choice: a group of tiles higher than all rows, less than a tile,
    one rank."""
    problem = problem_of(op, *shape, ranks, dtype)
    choice = OPERATORS[op].table(problem)
    assert choice in OPERATORS[op].candidates(problem)
    assert all(0 <= us < 1e3 for us in OPERATORS[op].options(problem).values())
    assert choice.tiles == FP8 or dtype == torch.float16


def test_a_tile_takes_as_long_as_it_is_large():
    assert (
        estimate_tile_us(SMALL, 4096, 2)
        < estimate_tile_us(LARGE, 4096, 2)
        < estimate_tile_us(LARGE, 8192, 2)
    )
    assert estimate_tile_us(FP8, 4096, 1) < estimate_tile_us(SMALL, 4096, 2)


@pytest.mark.parametrize("chunk", [None, 5, 7])
def test_places_of_many_tiles(chunk):
    """The cost equals the sum over single tiles."""
    numbers = np.arange(4 * 21)
    owners, tiles = W.swizzle_ranks(numbers, 21, 1, 4, chunk)
    each = [W.swizzle_ranks(number, 21, 1, 4, chunk) for number in numbers.tolist()]
    assert list(zip(owners.tolist(), tiles.tolist(), strict=True)) == each
    places = W.swizzle_2d(numbers, 12, 7, chunk or 8)
    each = [W.swizzle_2d(number, 12, 7, chunk or 8) for number in numbers.tolist()]
    assert np.stack(places, 1).tolist() == [list(place) for place in each]


def test_copies_begin_when_products_are_there():
    """With one wave nothing is hidden: products for the peers are sent one after the other."""
    few = estimate_gemm_rs_persistent_us(128, 1024, 4096, 4, PERSISTENT_TILES[0])
    assert PersistentSchedule.for_tiles(4 * 4).waves == 1
    alone = estimate_tile_us(PERSISTENT_TILES[0], 4096, 2)
    assert few > alone + 3 * 128 * 1024 * 2 / 360e3
    assert estimate_gemm_rs_persistent_us(128, 1024, 4096, 1, PERSISTENT_TILES[0]) == pytest.approx(
        alone, abs=10
    )
