"""GEMM + reduce-scatter and all-gather + GEMM without explicit synchronization.

    torchrun --nproc-per-node=4 examples/inferred.py [--shape M N K] [--runs 20]

Both programs only state which memory is read and written. The compiler inserts counters, signals,
waits and the protection of memory between launches; `tileweave explain examples/inferred.py` lists
them. Each program is timed with its explicitly synchronized version, gemm_reduce_scatter.py or
all_gather_gemm.py, and with NCCL + cuBLAS.
"""

import argparse
import sys
from pathlib import Path

import tilelang.language as T
import torch
import torch.distributed as dist

import tileweave as tw
from tileweave import language as W

sys.path.insert(0, str(Path(__file__).resolve().parent))

from all_gather_gemm import AllGatherGemm
from gemm_reduce_scatter import GemmReduceScatter, slowest_rank

WARMUPS, TOLERANCE = 3, 1e-2


def gemm_reduce_scatter(M, N, K, ranks, block_M=128, block_N=256, block_K=64, stages=3):
    """Return a program that computes this rank's rows of the sum over ranks of A B^T.

    C has shape (M / ranks, N). K is one rank's part of the inner dimension.
    """
    rows_per_rank = M // ranks
    rows, columns = rows_per_rank // block_M, N // block_N
    tiles = rows * columns

    @T.prim_func
    def reduce_scatter(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((rows_per_rank, N), "bfloat16"),
    ):
        with T.Kernel(tiles * ranks, threads=256) as block:
            parts = W.alloc_symmetric((M, N), "bfloat16")
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
            row, column = W.swizzle_2d(tile, rows, columns)

            T.clear(total)
            for k in T.Pipelined(K // block_K, num_stages=stages):
                T.copy(A[owner * rows_per_rank + row * block_M, k * block_K], A_tile)
                T.copy(B[column * block_N, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)

            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me * rows_per_rank + row * block_M, column * block_N])
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks  # in the order of arrival
                    T.copy(
                        parts[me, source * rows_per_rank + row * block_M, column * block_N], C_tile
                    )
                    for i, j in T.Parallel(block_M, block_N):
                        total[i, j] += C_tile[i, j]
                T.copy(total, C_tile)
                T.copy(C_tile, C[row * block_M, column * block_N])

    return reduce_scatter


def all_gather_gemm(M, N, K, ranks, block_M=128, block_N=256, block_K=64, stages=3):
    """Return a plan that multiplies the A of all ranks by B^T.

    A is this rank's part, of shape (M / ranks, K). C has shape (M, N).
    """
    rows_per_rank = M // ranks
    rows, columns = rows_per_rank // block_M, N // block_N
    tiles = rows * columns

    @T.prim_func
    def gathered_gemm(
        B: T.Tensor((N, K), "bfloat16"),
        gathered: W.Symmetric((M, K), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        with T.Kernel(tiles * ranks, threads=256) as block:
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            me = W.rank()
            source = (me + ranks - block // tiles) % ranks  # in the order of arrival
            row, column = W.swizzle_2d(block % tiles, rows, columns)

            T.clear(total)
            for k in T.Pipelined(K // block_K, num_stages=stages):
                T.copy(gathered[me, source * rows_per_rank + row * block_M, k * block_K], A_tile)
                T.copy(B[column * block_N, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C_tile)
            T.copy(C_tile, C[source * rows_per_rank + row * block_M, column * block_N])

    @tw.plan
    def all_gather(
        p: tw.PlanBuilder,
        A: T.Tensor((rows_per_rank, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        gathered: W.Symmetric((M, K), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        own_rows = slice(p.rank * rows_per_rank, (p.rank + 1) * rows_per_rank)
        for peer in p.peers():
            p.copy(gathered[peer, own_rows], A, stream="copies")
        p.copy(gathered[p.rank, own_rows], A)
        p.launch(gathered_gemm, B, gathered, C)

    return all_gather


def timed(operators: dict, inputs, runs: int) -> dict[str, float]:
    """Return the time of each operator in ms on the slowest rank.

    The operators run in turn, in alternating order. A sleep on the GPU hides the host time.
    """
    times: dict[str, list[float]] = {name: [] for name in operators}
    for run in range(WARMUPS + runs):
        tensors = inputs()
        for name in list(operators)[:: 1 if run % 2 else -1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            tw.barrier()
            torch.cuda._sleep(4_000_000)
            begin.record()
            operators[name](*tensors)
            end.record()
            torch.cuda.synchronize()
            if run >= WARMUPS:
                times[name].append(begin.elapsed_time(end))
    return {name: slowest_rank(t) for name, t in times.items()}


def random_matrices(*rows: int, K: int) -> list[torch.Tensor]:
    """Return a random matrix with K columns for each number of rows."""
    return [torch.randn(n, K, device="cuda").div_(8).bfloat16() for n in rows]


def report(operator: str, times: dict[str, float], error: float) -> bool:
    """Print times, speed-ups and the error on rank 0. Return whether the error is small enough."""
    if tw.rank() == 0:
        measured = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
        print(
            f"{operator}: {measured}; speed-up {times['explicit'] / times['inferred']:.3f}x over "
            f"explicit, {times['NCCL'] / times['inferred']:.2f}x over NCCL + cuBLAS, "
            f"relative error {error:.1e}"
        )
    return error <= TOLERANCE


def compare_reduce_scatter(M: int, N: int, K_total: int, runs: int) -> bool:
    ranks = tw.world_size()
    K = K_total // ranks
    explicit = GemmReduceScatter(M, N, K)
    kernel = tw.compile(gemm_reduce_scatter(M, N, K, ranks))
    C, D, E = (torch.empty(M // ranks, N, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def nccl(A, B):
        if ranks > 1:
            dist.reduce_scatter_tensor(D, A @ B.t())
        else:
            torch.mm(A, B.t(), out=D)

    operators = {
        "inferred": lambda A, B: kernel(A, B, C),
        "explicit": lambda A, B: explicit(A, B, E),
        "NCCL": nccl,
    }
    times = timed(operators, lambda: random_matrices(M, N, K=K), runs)
    error = ((C.float() - D.float()).norm() / D.float().norm()).item()
    kernel.free()
    explicit.free()
    return report(f"GEMM + reduce-scatter {M} x {N} x {K_total}", times, error)


def compare_all_gather(M: int, N_total: int, K: int, runs: int) -> bool:
    ranks = tw.world_size()
    N = N_total // ranks
    explicit = AllGatherGemm(M, N, K)
    plan = all_gather_gemm(M, N, K, ranks)
    gathered = tw.symmetric((M, K), torch.bfloat16)
    A_of_all_ranks = torch.empty(M, K, device="cuda", dtype=torch.bfloat16)
    C, D, E = (torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def nccl(A, B):
        if ranks > 1:
            dist.all_gather_into_tensor(A_of_all_ranks, A)
        else:
            A_of_all_ranks.copy_(A)
        torch.mm(A_of_all_ranks, B.t(), out=D)

    operators = {
        "inferred": lambda A, B: plan(A, B, gathered, C),
        "explicit": lambda A, B: explicit(A, B, E),
        "NCCL": nccl,
    }
    times = timed(operators, lambda: random_matrices(M // ranks, N, K=K), runs)
    error = ((C.float() - D.float()).norm() / D.float().norm()).item()
    gathered.free()
    explicit.free()
    return report(f"all-gather + GEMM {M} x {N_total} x {K}", times, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was run; `tileweave simulate` runs programs without one")
        return 0
    tw.init()
    shapes = options.shape or [(4096, 8192, 28672), (8192, 8192, 28672)]
    results = [compare_reduce_scatter(*shape, options.runs) for shape in shapes]
    results += [compare_all_gather(M, K, N, options.runs) for M, N, K in shapes]
    passed = all(results)
    if tw.rank() == 0:
        print("passed" if passed else f"failed: relative error above {TOLERANCE:.0e}")
    tw.finalize()
    return 0 if passed else 1


# Small instances for tileweave explain examples/inferred.py
reduce_scatter_example = gemm_reduce_scatter(1024, 512, 256, 4)
all_gather_example = all_gather_gemm(1024, 512, 256, 4)

if __name__ == "__main__":
    sys.exit(main())
