"""The inference evaluates every iteration on all ranks: its memory grows no faster than these."""

import tracemalloc

import pytest
import torch
from tilelang import tvm

from tileweave.ops.attention.flash import tiles_for
from tileweave.ops.attention.problem import AttentionProblem
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.autotune.trial import problem_of
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import LARGE, Choice
from tileweave.passes import run_group
from tileweave.passes.sync.infer.infer_sync import infer_sync
from tileweave.runtime.plans.sync_push import sync_of

RANKS = 8


def stores(rows: int):
    """Return a function that infers a kernel of stores to peers, and the iterations of
    its loads."""
    problem = problem_of("all_gather_matmul", rows, 14336, 8192, RANKS, torch.bfloat16)
    program = OPERATORS["all_gather_matmul"].program(problem, Choice("stores", LARGE))
    mod = tvm.IRModule({"program": program})
    (program,) = run_group(mod, RANKS, 1 << 40, ["group"]).functions.values()
    blocks = rows // LARGE.M * (14336 // RANKS // LARGE.N)
    return lambda: infer_sync(program, RANKS, 1 << 40), RANKS * blocks * (8192 // LARGE.K)


def attention(keys: int):
    """Return a function that infers causal attention, and the iterations of its loads."""
    rows = keys // RANKS
    problem = AttentionProblem(
        1, rows, rows, 32, 8, 128, 128, RANKS, torch.bfloat16, True, "contiguous", 0.1
    )
    tiles = tiles_for(problem)
    plan = sp_attention_plan(problem, tiles)
    shapes = {p.name: p.shape for p in plan.parameters}
    traces = [plan._traced(rank, RANKS, shapes, {}) for rank in range(RANKS)]
    return lambda: sync_of(traces), RANKS * -(-rows // tiles.M) * (keys // tiles.N)


@pytest.mark.parametrize(("program", "size"), [(stores, 4096), (attention, 131072)])
def test_memory_grows_as_iterations(program, size):
    infer, iterations = program(size)
    tracemalloc.start()
    try:
        infer()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 * iterations + (16 << 20), f"{peak >> 20} MiB for {iterations} iterations"
