"""Tile programs of the operators on simulated ranks, against NumPy; and that they compile."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave.ops.core import tiles as tiles_module
from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import (
    CANDIDATES,
    DEVICE,
    FEW_ROWS,
    FP8_CANDIDATES,
    LARGE,
    PERSISTENT_TILES,
    SMALL,
    Choice,
    PersistentSchedule,
    Tiles,
    stores_last_peer,
    tiles_for,
)
from tileweave.ops.core.tiles import FP8 as FP8_TILES
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.all_gather_matmul import AllGatherMatmul, _choice_keeping_rows
from tileweave.ops.gemm.kernels.all_gather_gemm import (
    ag_gemm_comm_blocks,
    ag_gemm_copy_engine,
    ag_gemm_push,
)
from tileweave.ops.gemm.kernels.comm_blocks import CommBlocks
from tileweave.ops.gemm.kernels.gemm_all_reduce import (
    gemm_ar_one_shot,
    gemm_ar_two_shot,
)
from tileweave.ops.gemm.kernels.gemm_persistent import gemm_ar_persistent, gemm_rs_persistent
from tileweave.ops.gemm.kernels.gemm_reduce_scatter import gemm_rs_one_shot, gemm_rs_store
from tileweave.ops.gemm.matmul_all_reduce import MatmulAllReduce, matmul_all_reduce_plan
from tileweave.ops.gemm.matmul_reduce_scatter import MatmulReduceScatter
from tileweave.passes.ir.sizes import named
from tileweave.runtime.plans.steps import Copy, CopyValue, Launch, WaitValue

pytestmark = pytest.mark.long

TILES = Tiles(16, 16, 16, stages=2, threads=32, group_m=1)
EVEN, TAILS = (16, 32, 32), (24, 40, 24)
"""rows_per_rank, N, K: whole tiles, and tails along every axis."""
FP8 = "float8_e4m3fn"
DTYPES = {
    "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, FP8: ml_dtypes.float8_e4m3fn
}  # fmt: skip
CASES = [
    (1, TAILS, False, "bfloat16", True),
    (2, EVEN, True, "float16", True),
    (2, TAILS, False, "float16", False),
    (3, TAILS, True, "bfloat16", True),
    (2, (8, 64, 136), False, "float16", True),
    (5, (8, 24, 8), False, "bfloat16", False),
    (8, (8, 8, 8), True, "bfloat16", True),
    (3, (24, 48, 48), True, FP8, True),
]
"""ranks; sizes; whether B is (N, K); type; whether there is a bias."""
TILE_COPIES = {
    ag_gemm_copy_engine: (3, 1),
    ag_gemm_comm_blocks: (3, 1),
    ag_gemm_push: (2, 1),
    gemm_rs_store: (2, 2),
    gemm_rs_persistent: (5, 3),
    gemm_rs_one_shot: (2, 2),
    gemm_ar_one_shot: (2, 2),
    gemm_ar_two_shot: (2, 4),
}
"""The kernels, and how often the text of each loads and stores a tile of so few rows."""
FP8_COPIES = {**TILE_COPIES, gemm_rs_persistent: (2, 3)}
"""The same of fp8, whose parts are not added as tiles of A."""
ALL_REDUCES = gemm_ar_one_shot, gemm_ar_two_shot
RESIDENT = 32
"""Blocks at a time: all of the programs, and what waits beside them."""


def M_of(make):
    """Rows of the product of 4 ranks: 200 of each rank, or 200 in all that are reduced."""
    return 200 if make in ALL_REDUCES else 800


def rounded_to(dtype):
    """Return the name of the result's type in TileLang."""
    return "float16" if dtype == FP8 else dtype


def simulated(program, ranks, a_shape, b_shape, transposed, dtype, biased):
    """Return A, B, bias and C of each rank; without a bias it is 0. B includes the scales of fp8.

    Numbers are small integers, so all sums are exact in every type.
    """
    rng = np.random.default_rng(ranks)
    inputs, scaled = [], []
    for rank in range(ranks):
        a, b, bias = (
            rng.integers(-4, 5, shape).astype(DTYPES[kind])
            for shape, kind in ((a_shape, dtype), (b_shape, dtype), (b_shape[1], rounded_to(dtype)))
        )
        inputs.append({"A": a, "B": b.T.copy() if transposed else b})
        scaled.append(b.astype(np.float32))
        if biased:
            inputs[-1]["bias"] = bias
        inputs[-1] |= identity_for(program)
        if dtype == FP8:
            scales = np.float32([0.25]), np.float32([2 * (rank + 1)])
            inputs[-1] |= dict(zip(("scale_a", "scale_b"), scales, strict=True))
            scaled[-1] *= scales[0] * scales[1]
    # Smaller groups cover the interleavings; large ones cover numbers of ranks.
    schedules = 2 if ranks < 5 else 1
    outputs = tw.simulate(program, ranks, inputs, schedules, resident_blocks=RESIDENT)
    return (
        [given["A"] for given in inputs],
        scaled,
        [given.get("bias", 0) for given in inputs],
        [output["C"] for output in outputs],
    )


def identity_for(program):
    """Return the identity that a plan needs to add parts by products, by name."""
    parameters = program.parameters if isinstance(program, tw.Plan) else ()
    wanted = [p for p in parameters if p.name == "identity"]
    return {p.name: np.eye(*p.extents).astype(DTYPES[p.dtype]) for p in wanted}


def exact(a, b):
    return a.astype(np.float32) @ b.astype(np.float32)


def assert_values(
    operator, way, ranks, sizes, transposed, dtype, biased=False, tiles=TILES, owned=None
):
    """Compare each rank's result with the exact one.

    Args:
        sizes: M, N and K.
        owned: rows to which a rank adds its bias, once; None for an equal part of M.
    """
    M, N, K = sizes
    config = GemmConfig(M, N, K, ranks, dtype, transposed, tiles, biased, rounded_to(dtype))
    rows = M // ranks if operator is AllGatherMatmul else M
    a, b, bias, c = simulated(
        operator.programs[way](config), ranks, (rows, K), (K, N), transposed, dtype, biased
    )
    if operator is AllGatherMatmul:
        rights = [exact(np.concatenate(a), y) + z for y, z in zip(b, bias, strict=True)]
    else:
        total, owned = sum(map(exact, a, b)), owned or -(-M // ranks)
        rights = [total[r * owned :][:owned] + z for r, z in enumerate(bias)]
        if operator is MatmulAllReduce:
            rights = [np.concatenate(rights)] * ranks
    for rank, (actual, right) in enumerate(zip(c, rights, strict=True)):
        right = right.astype(DTYPES[rounded_to(dtype)])
        assert np.array_equal(actual.reshape(right.shape), right), rank


@pytest.mark.parametrize(
    ("operator", "way"),
    [(kind, way) for kind in (MatmulReduceScatter, AllGatherMatmul) for way in kind.programs],
)
@pytest.mark.parametrize(("ranks", "sizes", "transposed", "dtype", "biased"), CASES)
def test_rows_of_ranks(operator, way, ranks, sizes, transposed, dtype, biased):
    rows_per_rank, N, K = sizes
    assert_values(operator, way, ranks, (ranks * rows_per_rank, N, K), transposed, dtype, biased)


@pytest.mark.parametrize(
    ("ranks", "K", "num_chunks"), [(2, 64, 3), (2, 136, 4), (3, 56, 2), (4, 128, 4)]
)
def test_rows_come_in_chunks(ranks, K, num_chunks):
    tiles = replace(TILES, num_chunks=num_chunks)
    whole, first = range(K), tiles.widening(K)
    assert len(first) == num_chunks and [k for chunk in first for k in whole[chunk]] == [*whole]
    sizes = ranks * 24, 40, K
    assert_values(AllGatherMatmul, "copy_engines", ranks, sizes, True, "float16", tiles=tiles)


@pytest.mark.parametrize("way", MatmulAllReduce.programs)
@pytest.mark.parametrize(
    ("ranks", "sizes", "transposed", "dtype"),
    [
        (1, (24, 40, 24), False, "bfloat16"),
        (2, (32, 32, 32), True, "float16"),
        (3, (40, 56, 24), True, "bfloat16"),
        (4, (8, 8, 8), False, "float16"),
        (5, (64, 48, 8), False, "bfloat16"),
        (2, (24, 48, 16), True, FP8),
    ],
)
def test_matmul_all_reduce(way, ranks, sizes, transposed, dtype):
    """M, N, K: whole tiles; tails; fewer tiles than ranks; tiles that ranks cannot share evenly."""
    assert_values(MatmulAllReduce, way, ranks, sizes, transposed, dtype)


@pytest.mark.parametrize(
    ("ranks", "rows_per_rank", "group_m", "num_chunks", "dtype"),
    [
        (2, 32, 1, 1, "bfloat16"), (2, 64, 2, 2, "float16"), (3, 32, 2, 3, "bfloat16"),
        (4, 32, 1, 6, "float16"), (2, 32, 2, 3, FP8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("operator", [MatmulReduceScatter, MatmulAllReduce])
def test_walks_of_many_turns(
    operator, ranks, rows_per_rank, group_m, num_chunks, dtype, monkeypatch
):
    """Few SMs: copy engines deliver all tiles in time, chunk by chunk."""
    monkeypatch.setattr(tiles_module, "DEVICE", tiles_module.DeviceSpec(6))
    tiles, N, K = replace(TILES, group_m=group_m, num_chunks=num_chunks), 88, 24
    assert tiles.has_whole_chunks(rows_per_rank, N) and not stores_last_peer(
        rows_per_rank, N, ranks, tiles
    )
    M = ranks * rows_per_rank - (0 if operator is MatmulReduceScatter else 8)
    assert_values(
        operator, "copy_engines", ranks, (M, N, K), True, dtype, True, tiles, rows_per_rank
    )


@pytest.mark.parametrize(("ranks", "N"), [(2, 72), (3, 88), (4, 48)])
def test_steps_that_add_cross_tiles(ranks, N):
    """With tiles of 224 columns, the last peer's part must have arrived for both tiles."""
    tiles = Tiles(16, 24, 16, stages=2, threads=32)
    assert stores_last_peer(32, N, ranks, tiles)
    sizes = ranks * 32, N, 24
    assert_values(MatmulReduceScatter, "copy_engines", ranks, sizes, True, "bfloat16", tiles=tiles)


@pytest.mark.parametrize("tiles", [*PERSISTENT_TILES, FP8_TILES])
def test_chunks_are_of_whole_steps(tiles):
    """A step that adds a part would otherwise read two chunks."""
    rows_per_rank, N, fp8 = 1024, 20 * tiles.N - 8, tiles == FP8_TILES
    tiles = replace(tiles, num_chunks=2)
    assert tiles.has_whole_chunks(rows_per_rank, N) == (tiles.N != 224)
    if tiles.has_whole_chunks(rows_per_rank, N):
        dtype, out = (FP8, "bfloat16") if fp8 else ("bfloat16", None)
        config = GemmConfig(2 * rows_per_rank, N, 1024, 2, dtype, True, tiles, False, out)
        plan = MatmulAllReduce.programs["copy_engines"](config)
        assert len(plan.kernels(2)) == 3


@pytest.mark.parametrize("make", MatmulAllReduce.programs.values())
def test_all_ranks_get_the_same_bits(make):
    """The sum of these numbers depends on the order; the bias must be added once."""
    ranks, (M, N, K) = 4, (40, 48, 16)
    rng = np.random.default_rng(0)
    bias = rng.normal(size=N).astype(DTYPES["bfloat16"])
    inputs = [
        {
            "A": rng.normal(size=(M, K)).astype(DTYPES["bfloat16"]),
            "B": rng.normal(size=(K, N)).astype(DTYPES["bfloat16"]),
            "bias": bias,
        }
        for _ in range(ranks)
    ]
    program = make(GemmConfig(M, N, K, ranks, "bfloat16", False, TILES, biased=True))
    for given in inputs:
        given |= identity_for(program)
    first, *others = tw.simulate(program, ranks, inputs, schedules=1, resident_blocks=RESIDENT)
    assert all(np.array_equal(first["C"], other["C"]) for other in others)
    right = sum(exact(x["A"], x["B"]) for x in inputs) + bias.astype(np.float32)
    assert np.linalg.norm(first["C"].astype(np.float32) - right) < 1e-2 * np.linalg.norm(right)


@pytest.mark.parametrize("way", MatmulAllReduce.programs)
def test_one_rank_waits_for_nobody(way):
    program = MatmulAllReduce.programs[way](GemmConfig(24, 40, 24, 1, "bfloat16", False, TILES))
    kinds = {op.kind for op in tw.explain(program, 1).ops}
    assert ("wait" in kinds) == (way == "one_shot")  # which reads what it wrote


@pytest.mark.parametrize(
    ("ranks", "rows", "expected"),
    [
        (1, 24, "one_shot"), (1, 1 << 20, "one_shot"),
        (5, 32, "one_shot"), (5, 33, "one_shot"), (5, 256, "two_shot"),
        (2, 128, "one_shot"), (2, 129, "one_shot"), (2, 512, "one_shot"),
        (2, 1024, "copy_engines"), (2, 8192, "copy_engines"),
        (8, 16, "one_shot"), (8, 512, "two_shot"), (8, 16384, "copy_engines"),
    ],
)  # fmt: skip
def test_how_sums_are_exchanged(ranks, rows, expected):
    """In one shot for small sums, of 8192 columns of 2 bytes; by copy engines if the GEMM is long
    enough."""
    problem = Problem("matmul_all_reduce", rows, 8192, 8192, ranks, torch.bfloat16, False)
    assert MatmulAllReduce.table(problem).program == expected


@pytest.mark.parametrize(
    ("tiles", "transposed", "biased"), [(LARGE, False, True), (SMALL, True, False)]
)
@pytest.mark.parametrize("make", TILE_COPIES)
def test_tails_keep_the_tensor_cores_and_the_tma(make, transposed, tiles, biased):
    """A size that is no multiple of a tile needs a partial tile, not other code."""
    cuda = tw.emit(make(GemmConfig(M_of(make), 328, 136, 4, "float16", transposed, tiles, biased)))
    assert cuda.count("tl::wgmma_ss<") == 1
    assert (cuda.count("tl::tma_load("), cuda.count("tl::tma_store(")) == TILE_COPIES[make]
    assert "cp_async" not in cuda
    assert ("bias" in cuda) == biased


def test_what_is_not_late_stays():
    """Copy engines deliver all of many rows: the kernel loads parts and stores products
    and sums."""
    assert not stores_last_peer(1000, 8200, 4, LARGE)
    config = GemmConfig(4000, 8200, 136, 4, "float16", False, LARGE, True)
    cuda = tw.emit(gemm_rs_persistent(config))
    assert (cuda.count("tl::tma_load("), cuda.count("tl::tma_store(")) == (4, 2)
    assert "last_peer_buf" not in cuda and "cp_async" not in cuda


@pytest.mark.parametrize("make", TILE_COPIES)
def test_fp8_goes_to_the_tensor_cores(make):
    """With tails along every axis; sums of a tile are added in fp32 and scaled once."""
    config = GemmConfig(M_of(make), 336, 144, 4, FP8, True, FP8_TILES, True, "bfloat16")
    cuda = tw.emit(make(config))
    fp8 = "tl::DataType::kFloat8_e4m3"
    assert cuda.count("tl::wgmma_ss<") == cuda.count(f"<{fp8}, {fp8}, tl::DataType::kFloat32") == 1
    assert (cuda.count("tl::tma_load("), cuda.count("tl::tma_store(")) == FP8_COPIES[make]
    assert cuda.count("(scale_a[0] * scale_b[0])") == 1
    assert "float product[64]" in cuda and "cp_async" not in cuda


@pytest.mark.parametrize(
    ("ranks", "rows_per_rank", "N", "K", "tiles"),
    [(2, 256, 3584, 4096, SMALL), (2, 33, 512, 4104, FEW_ROWS[0]), (4, 64, 7168, 8192, SMALL)],
)
def test_rows_are_pushed_16_bytes_at_a_time(ranks, rows_per_rank, N, K, tiles):
    config = GemmConfig(ranks * rows_per_rank, N, K, ranks, "bfloat16", True, tiles)
    assert "*(uint4*)(gathered" in tw.emit(ag_gemm_push(config), world_size=ranks)


@pytest.mark.parametrize(
    ("ranks", "rows_per_rank", "N", "K", "tiles"),
    [
        (2, 512, 3584, 4096, PERSISTENT_TILES[0]),
        (4, 100, 512, 4104, PERSISTENT_TILES[3]),
        (8, 128, 3584, 8192, FP8_TILES),
    ],
)
def test_strips_are_sent_16_bytes_at_a_time(ranks, rows_per_rank, N, K, tiles):
    """All blocks use registers for this."""
    dtype = FP8 if tiles == FP8_TILES else "bfloat16"
    M = ranks * rows_per_rank
    config = GemmConfig(M, N, K, ranks, dtype, True, tiles, False, "bfloat16")
    cuda = tw.emit(ag_gemm_comm_blocks(config), world_size=ranks)
    sixteen = "fp8_e4_16_t" if dtype == FP8 else "uint4"
    assert f"*({sixteen}*)(gathered" in cuda and f"*({sixteen}*)(strip_regs" in cuda


@pytest.mark.parametrize(
    ("rows_per_rank", "N", "K", "ranks", "tiles", "itemsize"),
    [
        (256, 3584, 4096, 4, PERSISTENT_TILES[0], 2), (100, 520, 4104, 3, PERSISTENT_TILES[1], 2),
        (128, 3584, 8192, 8, FP8_TILES, 1), (8, 8, 8, 2, PERSISTENT_TILES[3], 2),
    ],
)  # fmt: skip
def test_strips_that_blocks_send(rows_per_rank, N, K, ranks, tiles, itemsize):
    """All rows go once to each other rank, one chunk to all ranks before the next one."""
    sent = CommBlocks.dedicated(rows_per_rank, N, K, ranks, tiles, itemsize)
    assert sent.strips == sent.num_chunks * sent.strips_per_chunk * sent.peers
    assert (sent.num_chunks - 1) * sent.width < K <= sent.num_chunks * sent.width
    assert (
        (sent.strips_per_chunk - 1) * sent.height
        < rows_per_rank
        <= sent.strips_per_chunk * sent.height
    )
    assert sent.width * itemsize % 256 == 0
    assert sent.height * sent.width * itemsize % ((tiles.threads + 128) * 16) == 0
    assert sent.height * sent.width * itemsize <= 48 << 10
    assert sent.peers == ranks - 1
    assert 0 < sent.blocks <= DEVICE.sm_count - sent.schedule.blocks
    assert CommBlocks.dedicated(rows_per_rank, N, K, 1, tiles, itemsize).blocks == 0


@pytest.mark.parametrize(
    ("rows", "program", "kept"),
    [
        (4, "stores", None),
        (256, "communicating_blocks", "copy_engines"),
        (1024, "copy_engines", "copy_engines"),
    ],
)  # fmt: skip
def test_what_keeps_gathered_rows(rows, program, kept):
    """Programs that keep them must be faster than NCCL, which would gather them, too."""
    problem = Problem("all_gather_matmul", rows, 3584, 4096, 4, torch.bfloat16, True)
    assert AllGatherMatmul.table(problem).program == program
    choice = _choice_keeping_rows(problem)
    assert choice == kept or choice.program == kept


def test_one_exchange_is_for_few_rows():
    """With more rows, blocks would wait for blocks that do not run yet."""
    problem = Problem("matmul_reduce_scatter", 32768, 256, 8192, 4, torch.bfloat16, False)
    choices = [*MatmulReduceScatter.options(problem), *MatmulReduceScatter.candidates(problem)]
    assert "one_shot" not in {c.program for c in choices}
    most = gemm_rs_one_shot(GemmConfig(2048, 256, 64, 4, "bfloat16", False, FEW_ROWS[1]))
    assert tw.explain(most, 4).ops  # not refused


@pytest.mark.parametrize("kind", [AllGatherMatmul, MatmulReduceScatter, MatmulAllReduce])
def test_what_another_version_may_have_chosen(kind):
    (name,) = (name for name, other in OPERATORS.items() if other is kind)
    problem = Problem(name, 1024, 4096, 4096, 4, torch.bfloat16, False)
    for program in kind.programs:
        for tiles in kind.tuning_tiles(problem):
            assert kind.has_choice(problem, Choice(program, tiles))
    assert not kind.has_choice(problem, Choice("three_phase", LARGE))
    assert not kind.has_choice(problem, Choice("copy_engines", replace(LARGE, K=48)))


EVERY_SHAPE = {(t.M, t.N): t for t in (*CANDIDATES, *PERSISTENT_TILES)}
EVERY_SHAPE_OF_FP8 = {(t.M, t.N): t for t in FP8_CANDIDATES}


@pytest.mark.parametrize("tiles", [*EVERY_SHAPE.values(), *EVERY_SHAPE_OF_FP8.values()], ids=str)
def test_each_warp_group_multiplies_rows_of_its_own(tiles, capfd):
    """TileLang keeps its barriers where parts of the result are stored ("Hoisting sync out of an
    if" would report otherwise)."""
    dtype = "float8_e4m3fn" if tiles in FP8_CANDIDATES else "bfloat16"
    config = GemmConfig(1024, 4 * tiles.N, 512, 2, dtype, True, tiles, False, "bfloat16")
    emitted = tw.emit(gemm_ar_persistent(config), world_size=2)
    depth = 32 if dtype == "float8_e4m3fn" else 16
    assert f" 64, {tiles.N}, {depth}, false, false" in emitted
    assert "ThreadSync" not in "".join(capfd.readouterr())


def test_signals_that_leave_a_loop_do_not_name_it():
    """Problems with tails and chunks, for which indices of tiles are too long to simplify."""
    tiles = replace(PERSISTENT_TILES[0], group_m=4)
    plan = matmul_all_reduce_plan(GemmConfig(3999, 2056, 1800, 4, "bfloat16", True, tiles))
    shapes = {p.name: tuple(p.extents) for p in plan.parameters}
    (kernel,) = (
        s.program for s in plan.trace(0, 4, shapes, {})
        if isinstance(s, Launch) and named(s.program) == "gemm_ar_persistent"
    )  # fmt: skip
    signals = [s for s in tw.emit(kernel, "tile").splitlines() if "tileweave.signal(" in s]
    assert len(signals) == 4 and not any("_tmp" in s for s in signals)


@pytest.mark.parametrize(("recorded", "wait"), [(False, WaitValue), (True, Launch)])
def test_sums_are_fetched_together(recorded, wait):
    """Copies of a group, one from each peer, come after all their waits.

    The products of the last peer are not copied, and the kernel pulls the last group.
    """
    plan = matmul_all_reduce_plan(GemmConfig(192, 16, 16, 4, "float16", False, TILES))
    shapes = {p.name: tuple(p.extents) for p in plan.parameters}
    steps = plan.trace(0, 4, shapes, {}, recorded=recorded)
    steps = [s for s in steps if s.stream == "copies"]
    kinds = "".join({wait: "w", Copy: "c", CopyValue: "f"}.get(type(s), "") for s in steps)
    sent, fetched = 2 * "wcf", "wwwccc"
    assert kinds == sent + 2 * (sent + fetched)


def test_registers_of_fp8_suffice(ptxas):
    """Two accumulators per tile; ptxas must not report spills for a kernel that adds everything."""
    config = GemmConfig(800, 336, 144, 4, FP8, True, FP8_TILES, True, "bfloat16")
    ptx = tw.emit(gemm_rs_store(config), stage="ptx")
    assert re.search(r"wgmma\.mma_async\S*m64n128k32\.f32\.e4m3\.e4m3", ptx)
    said = ptxas(ptx)
    assert " 0 bytes spill stores" in said and "serialized" not in said


@pytest.mark.parametrize(
    ("rows", "columns", "shards", "tiles"),
    [(1024, 8192, 4, LARGE), (256, 2048, 4, SMALL), (128, 256, 132, LARGE), (128, 256, 131, SMALL)],
)
def test_tiles(rows, columns, shards, tiles):
    assert tiles_for(rows, columns, shards) == tiles
    assert tiles_for(rows, columns, shards, itemsize=1) == FP8_TILES


@pytest.mark.parametrize(
    ("tiles", "schedule"),
    [
        (1, PersistentSchedule(1, 1, 1)),
        (131, PersistentSchedule(131, 1, 131)),
        (132, PersistentSchedule(132, 2, 66)),
        (133, PersistentSchedule(133, 2, 67)),
        (1024, PersistentSchedule(1024, 8, 128)),
    ],
)
def test_blocks_walk_over_as_many_tiles(tiles, schedule):
    assert PersistentSchedule.for_tiles(tiles) == schedule


@pytest.mark.parametrize(
    ("rows", "columns", "shards", "N"),
    [(1024, 8192, 4, 256), (1024, 7168, 2, 224), (512, 8192, 2, 256), (64, 512, 2, 64)],
)
def test_tiles_of_rows_that_are_gathered(rows, columns, shards, N):
    problem = Problem("all_gather_matmul", rows, columns, 8192, shards, torch.bfloat16, True)
    assert AllGatherMatmul.table(problem).tiles.N == N
    problem = replace(problem, dtype=torch.float8_e4m3fn, result=torch.bfloat16)
    assert replace(AllGatherMatmul.table(problem).tiles, num_chunks=1) == FP8_TILES


def test_parts_of_an_all_reduce_too_large_for_its_indices_are_not_copied():
    fits = Problem("matmul_all_reduce", 262144 - 512, 16384, 64, 2, torch.bfloat16, True)
    assert "copy_engines" in {c.program for c in MatmulAllReduce.candidates(fits)}
    too_large = replace(fits, rows=262144 - 127)  # whole tiles are summed up
    assert "copy_engines" not in {c.program for c in MatmulAllReduce.candidates(too_large)}
    assert MatmulAllReduce.table(too_large).program == "two_shot"


def test_all_sms_walk_where_nothing_waits_beside_them():
    assert PersistentSchedule.for_tiles(264, DEVICE.sm_count) == PersistentSchedule(264, 2, 132)


@pytest.mark.parametrize("operator", [MatmulReduceScatter, MatmulAllReduce])
def test_small_gpus_get_programs_whose_blocks_need_not_run_at_a_time(operator, monkeypatch):
    problem = Problem("matmul_reduce_scatter", 4096, 8192, 1024, 4, torch.bfloat16, False)
    walks = {c.program for c in [operator.table(problem), *operator.candidates(problem)]}
    monkeypatch.setattr(gemm_operator, "has_room_for_persistent_blocks", lambda: False)
    small = {c.program for c in [operator.table(problem), *operator.candidates(problem)]}
    assert walks - small == {"copy_engines"}
