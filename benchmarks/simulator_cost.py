"""Measure the CPU time of a simulated GEMM + reduce-scatter for several numbers of blocks.

    python benchmarks/simulator_cost.py [--blocks 64 128 256 512 1024 2048] [--ranks 4] [--profile]

Tiles are 64 x 64, and K = 512 over all ranks. M = N = 512 needs 64 blocks on each rank.
"""

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import tileweave as tw
from tileweave.simulator import Executable

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gemm_reduce_scatter import gemm_reduce_scatter

BLOCK, K = 64, 512


def prepare(blocks: int, ranks: int) -> tuple[Executable, list[dict[str, np.ndarray]]]:
    """Return the program with ``blocks`` blocks on each rank, and the inputs of each rank."""
    M, N = K, blocks * BLOCK * BLOCK // K
    if M * N != blocks * BLOCK * BLOCK:
        raise SystemExit(f"--blocks {blocks}: expected a multiple of {M // BLOCK}")
    tiles, rng = blocks // ranks, np.random.default_rng(0)
    inputs = [
        {
            "A": rng.standard_normal((M, K // ranks), np.float32).astype(ml_dtypes.bfloat16),
            "B": rng.standard_normal((N, K // ranks), np.float32).astype(ml_dtypes.bfloat16),
            "arrived": np.zeros((2, tiles), np.uint32),
            "state": np.zeros(2, np.uint32),
        }
        for _ in range(ranks)
    ]
    return Executable(gemm_reduce_scatter(M, N, K // ranks, ranks, BLOCK, BLOCK, 16), ranks), inputs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1, help="launches of a schedule")
    parser.add_argument("--profile", action="store_true", help="print the slowest functions")
    options = parser.parse_args()
    print("| blocks per rank | CPU s | ms per block |\n|---|---|---|")
    for blocks in options.blocks:
        program, inputs = prepare(blocks, options.ranks)
        profile = cProfile.Profile() if options.profile else None
        start = time.process_time()
        if profile:
            profile.enable()
        tw.simulate(program, options.ranks, inputs, epochs=options.epochs)
        if profile:
            profile.disable()
        seconds = time.process_time() - start
        ms_per_block = seconds / (blocks * options.ranks * options.epochs) * 1000
        print(f"| {blocks} | {seconds:.2f} | {ms_per_block:.2f} |", flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return 0


if __name__ == "__main__":
    sys.exit(main())
