"""Milliseconds that the inference of synchronisation adds to the compilation of a program.

    python benchmarks/infer_time.py [--runs 5] [--profile]

The least of some runs, against 50 ms, for the operators of examples/inferred.py at real sizes and
for a persistent kernel; only ``infer_sync``, after the group's constants are in, and for a plan all
that it adds.
"""

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tilelang.language as T
from tvm import tirx

import tileweave as tw
from tileweave import language as W
from tileweave.passes.infer_sync import infer_sync
from tileweave.passes.table import PREPARE_PASSES
from tileweave.runtime.plan_sync import sync_of

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
    start = time.perf_counter()
    sync_of(traces)
    return (time.perf_counter() - start) * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    options = parser.parse_args()
    print("| program | ranks | ms | within |\n|---|---|---|---|")
    M, N, K = 28672, 8192, 8192
    cases = [(what, ranks, once, program) for what, program, ranks in programs()]
    for ranks in (4, 8):
        plan = inferred.all_gather_gemm(M, N // ranks, K, ranks)
        plan = next(
            p for p in (plan if isinstance(plan, tuple) else (plan,)) if isinstance(p, tw.Plan)
        )
        cases.append((f"all-gather + GEMM, {M} x {N} x {K}", ranks, once_plan, plan))
    for what, ranks, run, program in cases:
        ms = min(run(program, ranks) for _ in range(options.runs))
        print(f"| {what} | {ranks} | {ms:.0f} | {'yes' if ms < BAR else 'no'} |", flush=True)
        if options.profile:
            profile = cProfile.Profile()
            profile.enable()
            run(program, ranks)
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    return 0


if __name__ == "__main__":
    sys.exit(main())
