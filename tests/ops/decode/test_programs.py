"""The program of decode attention on simulated ranks, against NumPy."""

import re
from dataclasses import replace

import pytest
import torch

import tileweave as tw
from tests.ops.decode.by_definition import Sequences, check
from tileweave.ops.decode.kernels.config import DecodeConfig, splits_for
from tileweave.ops.decode.kernels.decode_attention import decode_attention
from tileweave.ops.decode.problem import DecodeProblem
from tileweave.simulator.report.errors import SimulationError
from tileweave.simulator.simulate import executable_at

LONG = pytest.mark.long
SMALL = DecodeConfig(
    batch=2, heads=2, kv_heads=1, dim=64, v_dim=64, pages=24, page_size=16, table=8, ranks=2,
    dtype="bfloat16", cache_dtype="bfloat16", scale=0.125, has_lse=True, parts=2,
)  # fmt: skip
"""Program with splits and ranks. Some blocks have no keys, some tiles are not full."""
QUANTIZED = replace(SMALL, cache_dtype="float8_e4m3fn")
LATENT = replace(SMALL, heads=3, dim=576, v_dim=512, scale=0.04)


def run(config: DecodeConfig, lengths: list[int], schedules: int = 1, tolerance: float = 1e-2):
    """Simulate three launches, and compare them with the definition."""
    sequences = Sequences.of(config, lengths)
    inputs = [sequences.inputs(rank) for rank in range(config.ranks)]
    results = tw.simulate(decode_attention(config), config.ranks, inputs, schedules, epochs=3)
    check(results, sequences, tolerance)


CASES = {
    "splits and ranks": (SMALL, [100, 0]),
    "one block merges nothing": (replace(SMALL, heads=4, kv_heads=2, ranks=1, parts=1), [100, 0]),
    "one rank": (replace(SMALL, heads=4, ranks=1), [100, 0]),
    "fp8, one block merges nothing": (replace(QUANTIZED, ranks=1, parts=1), [100, 0]),
    "latent, one block merges nothing": (replace(LATENT, ranks=1, parts=1), [100, 0]),
}
LONG_CASES = {
    "one split, three ranks, odd heads": (
        replace(SMALL, batch=3, heads=5, page_size=64, table=2, ranks=3, parts=1),
        [65, 0, 130],
    ),
    "contiguous": (
        replace(
            SMALL, batch=3, page_size=32, table=3, sharding="contiguous", dtype="float16",
            cache_dtype="float16", ranks=3, parts=1,
        ),
        [96, 97, 250],
    ),
    "latent": (replace(LATENT, ranks=1), [100, 0]),
    "latent, two groups of heads": (
        replace(LATENT, batch=1, heads=66, table=2, ranks=1, parts=1), [25]
    ),
    "latent, contiguous": (
        replace(
            LATENT, batch=1, heads=1, page_size=32, table=2, sharding="contiguous", ranks=3,
            dtype="float16", cache_dtype="float16", parts=1,
        ),
        [150],
    ),
    "latent, interleaved": (replace(LATENT, page_size=64, table=2), [130, 200]),
    "fp8": (QUANTIZED, [100, 0]),
    "fp8, contiguous": (
        replace(
            QUANTIZED, batch=3, dim=128, v_dim=128, page_size=32, table=3, sharding="contiguous",
            dtype="float16", ranks=3, parts=1,
        ),
        [96, 97, 250],
    ),
    "fp8, three splits on one rank": (
        replace(QUANTIZED, batch=1, page_size=64, table=3, pages=3, ranks=1, parts=3), [170]
    ),
    "any tokens": (replace(SMALL, sharding="local", batch=2), [90, 1]),
    "more tokens than the table has": (replace(SMALL, batch=1, table=1, pages=2), [32]),
    "128 columns, pages of two tiles, steps of parts": (
        replace(
            SMALL, batch=1, dim=128, v_dim=128, page_size=128, table=3, parts=32, ranks=1
        ),
        [300],
    ),
    "latent, three rows of a section to each block": (replace(LATENT, ranks=1, parts=4), [100, 0]),
    "seven heads": (replace(SMALL, heads=7, parts=4), [100, 0]),
    "many heads": (
        replace(SMALL, batch=1, heads=96, table=3, ranks=1, parts=2), [33]
    ),
    "five ranks": (replace(SMALL, batch=1, table=2, ranks=5), [97]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "lengths"),
    [*CASES.values(), *(pytest.param(*case, marks=LONG) for case in LONG_CASES.values())],
    ids=[*CASES, *LONG_CASES],
)
def test_results(config, lengths):
    run(config, lengths)


@LONG
def test_many_schedules():
    run(replace(SMALL, batch=1, heads=1, table=4, ranks=3), [150], schedules=15)


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_that_merge_an_item_need_to_run_at_once(ranks):
    config = replace(SMALL, heads=8, ranks=ranks, parts=4)
    assert config.mergers == 4
    sequences = Sequences.of(config, [100, 0])
    inputs = [sequences.inputs(rank) for rank in range(ranks)]
    program = decode_attention(config)
    results = tw.simulate(program, ranks, inputs, resident_blocks=4, epochs=2)
    check(results, sequences, 1e-2)
    with pytest.raises(SimulationError, match="deadlock"):
        tw.simulate(program, ranks, inputs, resident_blocks=3)


EQUIVALENT = [
    # One signal adds all units of a part.
    "wait_reached target-1",
    # One block merges all rows of the ranks, so the first row has no other number.
    "ll_ld axis 3 flipped",
    # A rank sends results and logarithms to all ranks, in any order, and so all ranks have the same
    # words.
    "ll_st rank+1", "ll_st rank+1", "ll_ld rank+1",
]  # fmt: skip
"""Mutants that compute the same."""


@LONG
@pytest.mark.parametrize(
    "tested", [SMALL, QUANTIZED, replace(LATENT, heads=2)], ids=["small", "fp8", "latent"]
)
def test_every_mutant_is_killed_or_equivalent(tested):
    config = replace(tested, batch=1, table=4)
    sequences = Sequences.of(config, [100])
    inputs = [sequences.inputs(rank) for rank in range(config.ranks)]
    mutants = tw.mutate(decode_attention(config), config.ranks, inputs, schedules=5)
    assert sorted(m.name for m in mutants if not m.is_accounted_for) == sorted(EQUIVALENT)
    assert [m.verdict for m in mutants].count("killed") >= 25


@LONG
@pytest.mark.parametrize(
    ("tested", "protocol"),
    [(SMALL, "flag"), (SMALL, "ll"), (QUANTIZED, "ll"), (replace(LATENT, heads=2), "ll")],
    ids=["flag", "ll", "fp8", "latent"],
)  # fmt: skip
def test_device_functions(tested, protocol):
    """Parts that are exchanged as words would be compared bit by bit with those of tiles, and fp32
    sums have another order there; so words are compared with the definition."""
    config = replace(tested, batch=1, table=4)
    sequences = Sequences.of(config, [100])
    inputs = [sequences.inputs(rank) for rank in range(config.ranks)]
    program = decode_attention(config)
    if protocol == "flag":
        results = tw.validate(
            program, config.ranks, inputs, pass_configs={"tileweave.protocol": {"sums": "flag"}}
        )
    else:
        device = executable_at(program, config.ranks, "device", "sm_90a")
        results = tw.simulate(device, config.ranks, inputs, epochs=2)
    check(results, sequences, 1e-2)


@LONG
def test_blocks_without_keys_merge():
    """Queries may still arrive in the shared memory of such a block."""
    config = replace(SMALL, heads=8, table=8, ranks=1, parts=4)
    sequences = Sequences.of(config, [100, 0])
    device = executable_at(decode_attention(config), 1, "device", "sm_90a")
    check(tw.simulate(device, 1, [sequences.inputs(0)], epochs=2), sequences, 1e-2)


@LONG
def test_tiles_of_fp8_are_aligned_after_many_splits():
    """The block holds more bytes of 16 parts than of a tile."""
    config = replace(
        QUANTIZED, batch=1, heads=16, kv_heads=2, page_size=64, table=16, pages=19, ranks=1,
        dtype="float16", sharding="contiguous", parts=16,
    )  # fmt: skip
    sequences = Sequences.of(config, [50])
    device = executable_at(decode_attention(config), 1, "device", "sm_90a")
    check(tw.simulate(device, 1, [sequences.inputs(0)]), sequences, 1e-3)


LLAMA = DecodeConfig(64, 64, 8, 128, 128, 65536, 64, 512, 4, "bfloat16", "bfloat16", 0.088)


def copies_and_registers(ptxas, config: DecodeConfig) -> tuple[int, int]:
    """Return the copies of keys of a tile, which a producer loads, and the registers of a thread.
    Nothing is spilled."""
    program = decode_attention(config)
    source = tw.emit(program, world_size=config.ranks)
    loop = source[source.index("for (int step = 0; step < steps") :]
    producer = loop[: loop.index("} else {")]
    assert "block_table[" in producer and "wgmma" not in producer
    assert "wgmma" in loop
    said = ptxas(tw.emit(program, stage="ptx", world_size=config.ranks))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert set(spills) == {("0", "0")}
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
    return len(re.findall(r"tl::tma_load\(k_cache_desc", producer)), registers


@LONG
@pytest.mark.parametrize(
    ("page_size", "cache_dtype", "copies"),
    [(16, "bfloat16", 8), (64, "bfloat16", 1), (16, "float8_e4m3fn", 4), (64, "float8_e4m3fn", 1)],
)
def test_pages_are_loaded_by_the_tma_without_spills(ptxas, page_size, cache_dtype, copies):
    """Two blocks fit on an SM: at most 128 registers for 256 threads, and 113 KiB."""
    config = replace(LLAMA, page_size=page_size, cache_dtype=cache_dtype)
    loaded, registers = copies_and_registers(ptxas, config)
    assert loaded == copies and registers <= 128


MLA = replace(LLAMA, heads=16, kv_heads=1, dim=576, v_dim=512)


@LONG
@pytest.mark.parametrize(
    ("heads", "ranks", "page_size", "copies"),
    [(16, 1, 64, 2), (16, 2, 64, 2), (64, 2, 16, 36), (128, 4, 64, 2)],
)
def test_latent_pages_are_loaded_by_the_tma_without_spills(ptxas, heads, ranks, page_size, copies):
    config = replace(MLA, heads=heads, ranks=ranks, page_size=page_size)
    loaded, registers = copies_and_registers(ptxas, config)
    assert loaded == copies and registers == 168


@LONG
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("heads", "most"), [(LLAMA, 128), (replace(MLA, heads=128), 168)])
def test_merging_splits_needs_no_more_registers(ptxas, heads, most, batch, ranks):
    config = replace(heads, batch=batch, ranks=ranks)
    assert config.splits > 1
    _, registers = copies_and_registers(ptxas, config)
    assert registers <= most


def test_merging_needs_no_shared_memory_beside_the_tiles_of_a_latent_cache():
    """The last buffer is the workspace of a sum of 256 threads. Barriers occupy 1 KiB."""
    source = tw.emit(decode_attention(MLA), world_size=MLA.ranks)
    last = max(map(int, re.findall(r"buf_dyn_shmem \+ (\d+)", source)))
    assert last + 4 * 256 + 1024 <= 227 * 1024


@pytest.mark.parametrize(
    ("items", "tiles", "splits"),
    [
        (1, 2048, 128),
        (8, 2048, 32),
        (8, 3, 2),
        (8, 0, 1),
        (100, 64, 2),
        (264, 64, 1),
        (9999, 64, 1),
    ],
)
def test_splits_fill_the_gpu(items, tiles, splits):
    assert splits_for(items, tiles) == splits


@pytest.mark.parametrize(("heads", "rows"), [(8, 8), (64, 64), (96, 48), (128, 64), (67, 1)])
def test_blocks_share_the_heads_equally(heads, rows):
    config = replace(LLAMA, heads=heads, kv_heads=1)
    assert (config.rows, config.items) == (rows, 64 * heads // rows)
    assert config.mergers * config.merge_rows == config.part_rows
    assert config.rank_blocks * config.rank_rows == 64 * heads
    assert config.ranks % config.ranks_per_load == 0


@pytest.mark.parametrize("heads", [3, 7, 64, 96, 128])
@pytest.mark.parametrize("parts", [1, 2, 32, 64])
def test_rows_merged_by_ranks_nest_in_rows_that_are_sent_together(heads, parts):
    """Otherwise a wait covers more rows than a block merges."""
    for shape in (LLAMA, MLA):
        config = replace(shape, heads=heads, kv_heads=1, parts=parts, ranks=4)
        assert 0 in (config.rank_rows % config.merge_rows, config.merge_rows % config.rank_rows)


def test_no_program():
    problem = DecodeProblem(
        "", 2, 8, 2, 128, 128, 9, 64, 4, 2, torch.bfloat16, torch.bfloat16, 0.1, "local", False,
        False,
    )  # fmt: skip
    assert problem.obstacle() is None
    assert replace(problem, cache_dtype=torch.float8_e4m3fn).obstacle() is None
    assert replace(problem, kv_heads=1, dim=576, v_dim=512, latent=True).obstacle() is None
    for changed, message in [
        ({"dtype": torch.float32}, "q is of torch.float32; expected torch.bfloat16 or torch.fl"),
        (
            {"latent": True, "cache_dtype": torch.float8_e4m3fn},
            "the latent cache is of torch.float8_e4m3fn; expected torch.bfloat16 as q",
        ),
        ({"dim": 96}, "heads have 96 and 128 elements; expected 64 or 128 for both"),
        ({"page_size": 48}, "pages have 48 tokens; expected 16, 32, 64, or a multiple of 64"),
        ({"pages": 1 << 25}, "the cache has 2147483648 tokens; expected less than 2**31"),
        ({"batch": 1 << 21}, "q has 2147483648 elements; expected less than 2**31"),
    ]:
        assert str(replace(problem, **changed).obstacle()).startswith(message)
