"""GEMM + reduce-scatter and all-gather + GEMM without explicit synchronization.

    torchrun --nproc-per-node=4 examples/inferred.py [--shape M N K] [--runs 20]

Both programs only say what is read and written where; the compiler puts in the counters, signals,
waits and what guards memory between launches (`tileweave explain examples/inferred.py` shows them).
Each is timed beside its hand-synchronised twin, gemm_reduce_scatter.py and all_gather_gemm.py, and
beside NCCL + cuBLAS.
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


def gemm_reduce_scatter(M, N, K, ranks, block_M=128, block_N=256, block_K=64, stages=3):
    """C (M / ranks, N): this rank's rows of the sum over ranks of A B^T; K is a rank's share."""
    share = M // ranks
    rows, columns = share // block_M, N // block_N
    tiles = rows * columns

    @T.prim_func
    def reduce_scatter(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((share, N), "bfloat16"),
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
                T.copy(A[owner * share + row * block_M, k * block_K], A_tile)
                T.copy(B[column * block_N, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)

            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me * share + row * block_M, column * block_N])
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks  # as they arrive
                    T.copy(parts[me, source * share + row * block_M, column * block_N], C_tile)
                    for i, j in T.Parallel(block_M, block_N):
                        total[i, j] += C_tile[i, j]
                T.copy(total, C_tile)
                T.copy(C_tile, C[row * block_M, column * block_N])

    return reduce_scatter


def all_gather_gemm(M, N, K, ranks, block_M=128, block_N=256, block_K=64, stages=3):
    """C (M, N): the A of all ranks times B^T; A is this rank's (M / ranks, K)."""
    share = M // ranks
    rows, columns = share // block_M, N // block_N
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
            source = (me + ranks - block // tiles) % ranks  # in the order in which they arrive
            row, column = W.swizzle_2d(block % tiles, rows, columns)

            T.clear(total)
            for k in T.Pipelined(K // block_K, num_stages=stages):
                T.copy(gathered[me, source * share + row * block_M, k * block_K], A_tile)
                T.copy(B[column * block_N, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C_tile)
            T.copy(C_tile, C[source * share + row * block_M, column * block_N])

    @tw.plan
    def all_gather(
        p: tw.PlanBuilder,
        A: T.Tensor((share, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        gathered: W.Symmetric((M, K), "bfloat16"),
        C: T.Tensor((M, N), "bfloat16"),
    ):
        mine = slice(p.rank * share, (p.rank + 1) * share)
        for peer in p.peers():
            p.copy(gathered[peer, mine], A, stream="copies")
        p.copy(gathered[p.rank, mine], A)
        p.launch(gathered_gemm, B, gathered, C)

    return all_gather


def timed(operators: dict, inputs, runs: int) -> dict[str, float]:
    """Return ms of each operator on the slowest rank; runs alternate, a sleep hides host time."""
    times: dict[str, list[float]] = {name: [] for name in operators}
    for turn in range(3 + runs):
        given = inputs()
        for name in list(operators)[:: 1 if turn % 2 else -1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            tw.barrier()
            torch.cuda._sleep(4_000_000)
            begin.record()
            operators[name](*given)
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(begin.elapsed_time(end))
    return {name: slowest_rank(t) for name, t in times.items()}


def randoms(*rows: int, K: int):
    return [torch.randn(n, K, device="cuda").div_(8).bfloat16() for n in rows]


def report(what: str, times: dict[str, float], error: float) -> bool:
    if tw.rank() == 0:
        each = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
        print(
            f"{what}: {each}; {times['by hand'] / times['inferred']:.3f}x of by hand, "
            f"{times['NCCL'] / times['inferred']:.2f}x of NCCL + cuBLAS, relative error {error:.1e}"
        )
    return error <= 1e-2


def compare_reduce_scatter(M: int, N: int, K_total: int, runs: int) -> bool:
    ranks = tw.world_size()
    K = K_total // ranks
    by_hand = GemmReduceScatter(M, N, K)
    kernel = tw.compile(gemm_reduce_scatter(M, N, K, ranks))
    C, D, E = (torch.empty(M // ranks, N, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def nccl(A, B):
        if ranks > 1:
            dist.reduce_scatter_tensor(D, A @ B.t())
        else:
            torch.mm(A, B.t(), out=D)

    operators = {
        "inferred": lambda A, B: kernel(A, B, C),
        "by hand": lambda A, B: by_hand(A, B, E),
        "NCCL": nccl,
    }
    times = timed(operators, lambda: randoms(M, N, K=K), runs)
    error = ((C.float() - D.float()).norm() / D.float().norm()).item()
    kernel.free()
    by_hand.free()
    return report(f"GEMM + reduce-scatter {M} x {N} x {K_total}", times, error)


def compare_all_gather(M: int, N_total: int, K: int, runs: int) -> bool:
    ranks = tw.world_size()
    N = N_total // ranks
    by_hand = AllGatherGemm(M, N, K)
    plan = all_gather_gemm(M, N, K, ranks)
    gathered = tw.symmetric((M, K), torch.bfloat16)
    everyones = torch.empty(M, K, device="cuda", dtype=torch.bfloat16)
    C, D, E = (torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def nccl(A, B):
        if ranks > 1:
            dist.all_gather_into_tensor(everyones, A)
        else:
            everyones.copy_(A)
        torch.mm(everyones, B.t(), out=D)

    operators = {
        "inferred": lambda A, B: plan(A, B, gathered, C),
        "by hand": lambda A, B: by_hand(A, B, E),
        "NCCL": nccl,
    }
    times = timed(operators, lambda: randoms(M // ranks, N, K=K), runs)
    error = ((C.float() - D.float()).norm() / D.float().norm()).item()
    gathered.free()
    by_hand.free()
    return report(f"all-gather + GEMM {M} x {N_total} x {K}", times, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was run; `tileweave simulate` runs the programs")
        return 0
    tw.init()
    shapes = options.shape or [(4096, 8192, 28672), (8192, 8192, 28672)]
    ok = [compare_reduce_scatter(*shape, options.runs) for shape in shapes]
    ok += [compare_all_gather(M, K, N, options.runs) for M, N, K in shapes]
    if tw.rank() == 0:
        print("right" if all(ok) else "wrong: relative error above 1e-2")
    tw.finalize()
    return 0 if all(ok) else 1


# Small instances to look at: tileweave explain examples/inferred.py
reduce_scatter_example = gemm_reduce_scatter(1024, 512, 256, 4)
all_gather_example = all_gather_gemm(1024, 512, 256, 4)

if __name__ == "__main__":
    sys.exit(main())
