"""Milliseconds and memory that the inference of synchronisation adds to compiling a program.

    python benchmarks/infer_time.py [--runs 5] [--profile] [--long]

The least of some runs, against 50 ms, for the operators of examples/inferred.py at real sizes and
for a persistent kernel; only ``infer_sync``, after the group's constants are in, and for a plan all
that it adds. The memory is NumPy's and Python's at its highest, of a run of its own. ``--long`` is
what takes longest: many rows that the blocks of a kernel store, and attention over many keys.
"""

import argparse
import cProfile
import pstats
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import tilelang.language as T
import torch
from tvm import tirx

import tileweave as tw
from tileweave import language as W
from tileweave.ops.attention.flash import tiles_for
from tileweave.ops.attention.problem import AttentionProblem
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.autotune.trial import problem_of
from tileweave.ops.core.operator import Choice
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import LARGE
from tileweave.passes.pipeline import PREPARE_PASSES
from tileweave.passes.sync.infer.infer_sync import infer_sync
from tileweave.runtime.plans import sync_push as plan_sync

BAR = 50.0
HEAP_STRIDE = 1 << 30

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import inferred  # noqa: E402


def persistent(M: int, N: int, blocks: int = 132):
    """Blocks that walk over the tiles of a ring shift."""
    tiles = M // 128 * (N // 256)

    @T.prim_func
    def program(X: T.Tensor((M, N), "bfloat16"), S: W.Symmetric((M, N), "bfloat16"),
                Y: T.Tensor((M, N), "bfloat16")):  # fmt: skip
        with T.Kernel(blocks, threads=256) as block:
            tile = T.alloc_shared((128, 256), "bfloat16")
            for turn in T.serial(T.ceildiv(tiles, blocks)):
                at = turn * blocks + block
                if at < tiles:
                    row, column = at // (N // 256) * 128, at % (N // 256) * 256
                    T.copy(X[row, column], tile)
                    T.copy(tile, S[(W.rank() + 1) % W.world_size(), row, column])
            for turn in T.serial(T.ceildiv(tiles, blocks)):
                at = turn * blocks + block
                if at < tiles:
                    row, column = at // (N // 256) * 128, at % (N // 256) * 256
                    T.copy(S[W.rank(), row, column], tile)
                    T.copy(tile, Y[row, column])

    return program


def programs() -> Iterator[tuple[str, tirx.PrimFunc, int]]:
    """(what, the program, ranks)."""
    M = N = 8192
    K = 28672
    for ranks in (4, 8):
        program = inferred.gemm_reduce_scatter(M, N, K // ranks, ranks)
        yield f"GEMM + reduce-scatter, {M} x {N} x {K}", program, ranks
        yield f"persistent ring shift, {M} x {N}", persistent(M, N), ranks


def once(program: tirx.PrimFunc, ranks: int) -> float:
    for p in PREPARE_PASSES:
        program = p.run(program, ranks, HEAP_STRIDE)
    start = time.perf_counter()
    infer_sync(program, ranks, HEAP_STRIDE)
    return (time.perf_counter() - start) * 1000


def once_plan(plan: tw.Plan, ranks: int) -> float:
    """All that ``sync_of`` does: it prepares and infers the kernel with the plan's copies."""
    shapes = {p.name: p.shape for p in plan.parameters}
    traces = [plan._traced(r, ranks, shapes, {}) for r in range(ranks)]
    for kept in (plan_sync._ordered, plan_sync._inferred):
        kept.cache_clear()
    start = time.perf_counter()
    plan_sync.sync_of(traces)
    return (time.perf_counter() - start) * 1000


def long_programs() -> Iterator[tuple]:
    """(what, ranks, ``once`` or ``once_plan``, the program)."""
    ranks = 8
    for M in (4096, 16384):
        problem = problem_of("all_gather_matmul", M, 14336, 8192, ranks, torch.bfloat16)
        program = OPERATORS["all_gather_matmul"].program(problem, Choice("stores", LARGE))
        yield f"all-gather + GEMM by stores, {M} x 14336 x 8192", ranks, once, program
    for keys in (65536, 262144):
        shape = 1, keys // ranks, keys // ranks, 32, 8, 128, 128
        attended = AttentionProblem(*shape, ranks, torch.bfloat16, True, "zigzag", 0.1)
        plan = sp_attention_plan(attended, tiles_for(attended))
        yield f"attention, {keys} keys, causal, zigzag", ranks, once_plan, plan


def highest_mib(run, program, ranks: int) -> float:
    """Memory of one run at its highest."""
    tracemalloc.start()
    try:
        run(program, ranks)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    parser.add_argument("--long", action="store_true", help="only what takes longest")
    options = parser.parse_args()
    print("| program | ranks | ms | within | MiB |\n|---|---|---|---|---|")
    M, N, K = 28672, 8192, 8192
    cases = [(what, ranks, once, program) for what, program, ranks in programs()]
    for ranks in (4, 8):
        plan = inferred.all_gather_gemm(M, N // ranks, K, ranks)
        plan = next(
            p for p in (plan if isinstance(plan, tuple) else (plan,)) if isinstance(p, tw.Plan)
        )
        cases.append((f"all-gather + GEMM, {M} x {N} x {K}", ranks, once_plan, plan))
    for what, ranks, run, program in long_programs() if options.long else cases:
        ms = min(run(program, ranks) for _ in range(options.runs))
        within, mib = "yes" if ms < BAR else "no", highest_mib(run, program, ranks)
        print(f"| {what} | {ranks} | {ms:.0f} | {within} | {mib:.0f} |", flush=True)
        if options.profile:
            profile = cProfile.Profile()
            profile.enable()
            run(program, ranks)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    return 0


if __name__ == "__main__":
    sys.exit(main())
