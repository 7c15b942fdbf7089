"""GEMM + reduce-scatter in one kernel: tiles go to their owners over NVLink and are summed there.

    torchrun --nproc-per-node=4 examples/gemm_reduce_scatter.py [--shape M N K] [--runs 20]

Every rank holds A (M, K / ranks) and B (N, K / ranks). Rank r receives its rows of the sum over
ranks of A B^T. Each block computes one (128, 256) tile. The TMA stores a tile of another rank in
that rank's staging memory, and the block signals its counter. The blocks of own tiles come last:
they wait for the tiles of the other ranks and add them in fp32. Nothing is reset between launches:
staging and counters alternate between two halves by epoch. The last block of a launch advances the
epoch in device memory, so that CUDA graphs use it too.
"""

import argparse
import sys

import tilelang.language as T
import torch
import torch.distributed as dist

import tileweave as tw
from tileweave import language as W


def check_sizes(**sizes):
    """Refuse an extent that is no positive multiple of its tile's extent.

    Args:
        sizes: by name, an extent and the tile's extent.
    """
    for name, (value, unit) in sizes.items():
        if value < unit or value % unit:
            raise ValueError(f"gemm_reduce_scatter: {name}={value}; expected a multiple of {unit}")


def gemm_reduce_scatter(M, N, K, ranks, block_M=128, block_N=256, block_K=64, stages=3):
    """Return the program for global M and N and a rank's part K of the inner dimension."""
    check_sizes(M=(M, block_M * ranks), N=(N, block_N), K=(K, block_K))
    rows_per_rank = M // ranks
    rows, columns = rows_per_rank // block_M, N // block_N
    tiles, blocks = rows * columns, rows * columns * ranks

    @T.prim_func
    def program(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        staging: W.Symmetric((2, M, N), "bfloat16"),
        arrived: W.Symmetric((2, tiles), "uint32"),
        state: T.Tensor((2,), "uint32"),
        C: T.Tensor((rows_per_rank, N), "bfloat16"),
    ):
        with T.Kernel(blocks, threads=256) as block:
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            me = W.rank()
            epoch = T.alloc_var("uint32")
            epoch = W.ld(state[0], sem="relaxed")
            half = T.Cast("int32", epoch % 2)
            T.assume(half >= 0)
            T.assume(half < 2)
            owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
            row, column = W.swizzle_2d(tile, rows, columns)
            m, n = row * block_M, column * block_N

            T.clear(total)
            for k in T.Pipelined(K // block_K, num_stages=stages):
                T.copy(A[owner * rows_per_rank + m, k * block_K], A_tile)
                T.copy(B[n, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)

            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, staging[owner, half, me * rows_per_rank + m, n])
                W.signal(arrived[owner, half, tile])
            else:
                W.wait_reached(arrived[me, half, tile], (epoch // 2 + 1) * (ranks - 1))
                for step in T.serial(ranks - 1):
                    source = (me + 1 + step) % ranks
                    T.copy(staging[me, half, source * rows_per_rank + m, n], C_tile)
                    for i, j in T.Parallel(block_M, block_N):
                        total[i, j] += C_tile[i, j]
                T.copy(total, C_tile)
                T.copy(C_tile, C[m, n])

            if T.get_thread_binding() == 0:
                finished = W.atom_add(state[1], 1, sem="acq_rel")
                if finished == blocks - 1:
                    W.st(state[1], 0)
                    W.st(state[0], epoch + 1)

    return program


class GemmReduceScatter:
    """Compiled kernel with the memory that it keeps between launches."""

    def __init__(self, M: int, N: int, K: int) -> None:
        ranks = tw.world_size()
        program = gemm_reduce_scatter(M, N, K, ranks)
        self.staging = tw.symmetric((2, M, N), torch.bfloat16)
        self.arrived = tw.symmetric((2, M // ranks // 128 * (N // 256)), torch.uint32)
        self.state = torch.zeros(2, dtype=torch.uint32, device="cuda")
        self.kernel = tw.compile(program)

    def __call__(self, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> None:
        self.kernel(A, B, self.staging, self.arrived, self.state, C)

    def free(self) -> None:
        self.arrived.free()
        self.staging.free()


def random_inputs(M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(n, K, device="cuda").div_(8).bfloat16() for n in (M, N))


def reference(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return the rank's rows of the sum, in fp32."""
    product = A.float() @ B.float().t()
    if tw.world_size() == 1:
        return product
    mine = torch.empty(len(A) // tw.world_size(), len(B), device="cuda")
    dist.reduce_scatter_tensor(mine, product)
    return mine


def slowest_rank(times: list[float]) -> float:
    """Return the median of ``times`` (ms) on the slowest rank."""
    median = torch.tensor([sorted(times)[len(times) // 2]], device="cuda")
    if tw.world_size() > 1:
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def run(M: int, N: int, K_total: int, runs: int) -> bool:
    K = K_total // tw.world_size()
    ours = GemmReduceScatter(M, N, K)
    C = torch.empty(M // tw.world_size(), N, device="cuda", dtype=torch.bfloat16)
    D = torch.empty_like(C)

    def nccl(A, B, _):
        if tw.world_size() > 1:
            dist.reduce_scatter_tensor(D, A @ B.t())
        else:
            torch.mm(A, B.t(), out=D)

    times: dict[str, list[float]] = {"ours": [], "nccl": []}
    worst = 0.0
    for run_number in range(3 + runs):
        A, B = random_inputs(M, N, K)
        C.fill_(float("nan"))
        for name, operator in (("ours", ours), ("nccl", nccl)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            tw.barrier()
            begin.record()
            operator(A, B, C)
            end.record()
            torch.cuda.synchronize()
            if run_number >= 3:
                times[name].append(begin.elapsed_time(end))
        right = reference(A, B)
        worst = max(worst, ((C.float() - right).norm() / right.norm()).nan_to_num(nan=9.0).item())
    error = torch.tensor([worst], device="cuda")
    if tw.world_size() > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
    ours_ms, nccl_ms = slowest_rank(times["ours"]), slowest_rank(times["nccl"])
    if tw.rank() == 0:
        print(
            f"{M} x {N} x {K_total} bf16 on {tw.world_size()}: fused {ours_ms:.3f} ms, "
            f"cuBLAS + NCCL {nccl_ms:.3f} ms ({nccl_ms / ours_ms:.2f}x), worst relative error "
            f"{error.item():.1e} in {3 + runs} runs"
        )
    ours.free()
    return error.item() <= 1e-2


def simulated_inputs(M: int, N: int, K: int, ranks: int, block: int) -> list[dict]:
    """Return the inputs of each simulated rank; tiles are ``block`` x ``block``."""
    import ml_dtypes
    import numpy as np

    random = np.random.default_rng()
    return [
        {
            "A": random.standard_normal((M, K)).astype(ml_dtypes.bfloat16),
            "B": random.standard_normal((N, K)).astype(ml_dtypes.bfloat16),
            "arrived": np.zeros((2, M // ranks // block * (N // block)), np.uint32),
            "state": np.zeros(2, np.uint32),
        }
        for _ in range(ranks)
    ]


def simulated(ranks: int = 4, size: int = 512, schedules: int = 5) -> bool:
    """Compare a small program on simulated ranks with NumPy; the simulator looks for faults too."""
    import numpy as np

    rows_per_rank, K = size // ranks, size // ranks
    program = gemm_reduce_scatter(size, size, K, ranks, block_M=64, block_N=64, block_K=32)
    inputs = simulated_inputs(size, size, K, ranks, 64)
    outputs = tw.simulate(program, world_size=ranks, inputs=inputs, schedules=schedules)
    exact = sum(i["A"].astype(np.float32) @ i["B"].astype(np.float32).T for i in inputs)
    worst = 0.0
    for rank, output in enumerate(outputs):
        mine = exact[rank * rows_per_rank : (rank + 1) * rows_per_rank]
        worst = max(
            worst, np.linalg.norm(output["C"].astype(np.float32) - mine) / np.linalg.norm(mine)
        )
    print(
        f"{size} x {size} x {size} bf16 on {ranks} simulated ranks: {schedules} interleavings of 3 "
        f"launches without a race, deadlock or reuse, relative error {worst:.1e}"
    )
    return worst <= 1e-2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was timed; the program runs in the simulator")
        ok = simulated()
        print("right" if ok else "wrong: relative error above 1e-2")
        return 0 if ok else 1
    tw.init()
    ok = all(
        [
            run(*shape, options.runs)
            for shape in options.shape or [(4096, 8192, 28672), (8192, 8192, 28672)]
        ]
    )
    if tw.rank() == 0:
        print("right" if ok else "wrong: relative error above 1e-2")
    tw.finalize()
    return 0 if ok else 1


# A small instance to look at: tileweave emit examples/gemm_reduce_scatter.py
example = gemm_reduce_scatter(1024, 512, 256, 4)

if __name__ == "__main__":
    sys.exit(main())
