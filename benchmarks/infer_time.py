"""Measure the time and memory that inferring synchronization adds to the compilation of a program.

    python benchmarks/infer_time.py [--runs 5] [--profile] [--long]

The programs are those of examples/inferred.py at real sizes, and a persistent kernel. The table has
the shortest of the runs and compares it with a limit of 50 ms. For a kernel it is the time of
``infer_sync`` alone; for a plan, of everything that inference adds. The memory is the peak of
Python and NumPy in a separate run. ``--long`` selects the slowest programs: kernels whose blocks
store many rows, and attention over many keys.
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
from tilelang import tvm
from tvm import tirx

import tileweave as tw
from tileweave import language as W
from tileweave.ops.attention.flash import tiles_for
from tileweave.ops.attention.problem import AttentionProblem
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.autotune.trial import problem_of
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import LARGE, Choice
from tileweave.passes import run_group
from tileweave.passes.sync.infer.infer_sync import infer_sync
from tileweave.runtime.kernel import for_group
from tileweave.runtime.plans import sync_push as plan_sync

MAX_MS = 50.0
HEAP_STRIDE = 1 << 30

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import inferred  # noqa: E402


def persistent(M: int, N: int, blocks: int = 132):
    """Return a ring shift by persistent blocks."""
    tiles = M // 128 * (N // 256)

    @T.prim_func
    def program(X: T.Tensor((M, N), "bfloat16"), S: W.Symmetric((M, N), "bfloat16"),
                Y: T.Tensor((M, N), "bfloat16")):  # fmt: skip
        with T.Kernel(blocks, threads=256) as block:
            tile = T.alloc_shared((128, 256), "bfloat16")
            for wave in T.serial(T.ceildiv(tiles, blocks)):
                index = wave * blocks + block
                if index < tiles:
                    row, column = index // (N // 256) * 128, index % (N // 256) * 256
                    T.copy(X[row, column], tile)
                    T.copy(tile, S[(W.rank() + 1) % W.world_size(), row, column])
            for wave in T.serial(T.ceildiv(tiles, blocks)):
                index = wave * blocks + block
                if index < tiles:
                    row, column = index // (N // 256) * 128, index % (N // 256) * 256
                    T.copy(S[W.rank(), row, column], tile)
                    T.copy(tile, Y[row, column])

    return program


def programs() -> Iterator[tuple[str, tirx.PrimFunc, int]]:
    """Yield name, program and number of ranks of each case."""
    M = N = 8192
    K = 28672
    for ranks in (4, 8):
        program = inferred.gemm_reduce_scatter(M, N, K // ranks, ranks)
        yield f"GEMM + reduce-scatter, {M} x {N} x {K}", program, ranks
        yield f"persistent ring shift, {M} x {N}", persistent(M, N), ranks


def time_kernel(program: tirx.PrimFunc, ranks: int) -> float:
    """Return the time of ``infer_sync`` in ms."""
    mod = tvm.IRModule({"program": program})
    (program,) = run_group(mod, ranks, HEAP_STRIDE, ["group"]).functions.values()
    start = time.perf_counter()
    infer_sync(program, ranks, HEAP_STRIDE)
    return (time.perf_counter() - start) * 1000


def time_plan(plan: tw.Plan, ranks: int) -> float:
    """Return the time of ``sync_of`` in ms, which infers the kernel together with the copies."""
    shapes = {p.name: p.shape for p in plan.parameters}
    traces = [plan._traced(r, ranks, shapes, {}) for r in range(ranks)]
    for cached in (plan_sync._ordered, for_group.inferred):
        cached.cache_clear()
    start = time.perf_counter()
    plan_sync.sync_of(traces)
    return (time.perf_counter() - start) * 1000


def long_programs() -> Iterator[tuple]:
    """Yield name, number of ranks, timing function and program of each slow case."""
    ranks = 8
    for M in (4096, 16384):
        problem = problem_of("all_gather_matmul", M, 14336, 8192, ranks, torch.bfloat16)
        program = OPERATORS["all_gather_matmul"].program(problem, Choice("stores", LARGE))
        yield f"all-gather + GEMM by stores, {M} x 14336 x 8192", ranks, time_kernel, program
    for keys in (65536, 262144):
        shape = 1, keys // ranks, keys // ranks, 32, 8, 128, 128
        problem = AttentionProblem(*shape, ranks, torch.bfloat16, True, "zigzag", 0.1)
        plan = sp_attention_plan(problem, tiles_for(problem))
        yield f"attention, {keys} keys, causal, zigzag", ranks, time_plan, plan


def peak_mib(run, program, ranks: int) -> float:
    """Return the peak memory of one run in MiB."""
    tracemalloc.start()
    try:
        run(program, ranks)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the slowest functions")
    parser.add_argument("--long", action="store_true", help="only the slowest programs")
    options = parser.parse_args()
    print("| program | ranks | ms | below limit | MiB |\n|---|---|---|---|---|")
    M, N, K = 28672, 8192, 8192
    cases = [(name, ranks, time_kernel, program) for name, program, ranks in programs()]
    for ranks in (4, 8):
        plan = inferred.all_gather_gemm(M, N // ranks, K, ranks)
        plan = next(
            p for p in (plan if isinstance(plan, tuple) else (plan,)) if isinstance(p, tw.Plan)
        )
        cases.append((f"all-gather + GEMM, {M} x {N} x {K}", ranks, time_plan, plan))
    for name, ranks, run, program in long_programs() if options.long else cases:
        ms = min(run(program, ranks) for _ in range(options.runs))
        is_fast, mib = "yes" if ms < MAX_MS else "no", peak_mib(run, program, ranks)
        print(f"| {name} | {ranks} | {ms:.0f} | {is_fast} | {mib:.0f} |", flush=True)
        if options.profile:
            profile = cProfile.Profile()
            profile.enable()
            run(program, ranks)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    return 0


if __name__ == "__main__":
    sys.exit(main())
