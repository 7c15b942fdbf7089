"""All-gather + GEMM: copy engines gather while one kernel multiplies what has arrived.

    torchrun --nproc-per-node=4 examples/all_gather_gemm.py [--shape M N K] [--runs 20]

Every rank holds A (M / ranks, K) and B (N / ranks, K) and computes C = A_all B^T, with the A of all
ranks. The plan, here on rank 1 of 4::

    copies | A to 2 | A to 3 | A to 0 |                     each copy is followed by a flag
    kernel | own tiles | tiles of 0 | tiles of 3 | tiles of 2 |
           |           ^            ^            ^          each block waits for one flag
    peers  |  0 to 1   | 3 to 1     | 2 to 1     |

The rank's own rows are copied before the kernel starts: a copy within one GPU needs SMs, and a
kernel that waits may occupy all of them.

Buffers and flags alternate between two halves by epoch, without reset or barrier. A rank overwrites
a peer's half two calls later. In the call between, its kernel has waited for a copy of that peer,
which the peer enqueued after the kernel that read the half.
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
            raise ValueError(f"all_gather_gemm: {name}={value}; expected a multiple of {unit}")


def all_gather_gemm(M, N, K, ranks, block_M=128, block_N=256, block_K=64, stages=3):
    """Return the plan for global M and K and the N columns of a rank, and its kernel."""
    check_sizes(M=(M, block_M * ranks), N=(N, block_N), K=(K, block_K))
    rows_per_rank = M // ranks
    rows, columns = rows_per_rank // block_M, N // block_N
    tiles = rows * columns

    @T.prim_func
    def gemm(
        B: T.Tensor((N, K), "bfloat16"),
        gathered: W.Symmetric((2, ranks, rows_per_rank, K), "bfloat16"),
        ready: W.Symmetric((2, ranks), "uint32"),
        C: T.Tensor((M, N), "bfloat16"),
        epoch: T.int32,
    ):
        with T.Kernel(tiles * ranks, threads=256) as block:
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            me = W.rank()
            half = epoch % 2
            # The left neighbor copies here first, then the one to its left: see p.peers().
            source = (me + ranks - block // tiles) % ranks
            row, column = W.swizzle_2d(block % tiles, rows, columns)

            T.clear(total)
            if source != me:
                W.wait_reached(ready[me, half, source], T.Cast("uint32", epoch + 1), peer=source)
            for k in T.Pipelined(K // block_K, num_stages=stages):
                T.copy(gathered[me, half, source, row * block_M, k * block_K], A_tile)
                T.copy(B[column * block_N, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            T.copy(total, C_tile)
            T.copy(C_tile, C[source * rows_per_rank + row * block_M, column * block_N])

    @tw.plan
    def plan(
        p: tw.PlanBuilder,
        A: T.Tensor((rows_per_rank, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        gathered: W.Symmetric((2, ranks, rows_per_rank, K), "bfloat16"),
        ready: W.Symmetric((2, ranks), "uint32"),
        C: T.Tensor((M, N), "bfloat16"),
        epoch: T.int32,
    ):
        half = epoch % 2
        for peer in p.peers():
            p.copy(gathered[peer, half, p.rank], A, stream="copies")
            p.write_value(ready[peer, half, p.rank], epoch + 1, stream="copies")
        p.copy(gathered[p.rank, half, p.rank], A)
        p.launch(gemm, B, gathered, ready, C, epoch)

    return plan, gemm


class AllGatherGemm:
    """Plan with the memory that it keeps between calls."""

    def __init__(self, M: int, N: int, K: int) -> None:
        ranks = tw.world_size()
        self.plan, _ = all_gather_gemm(M, N, K, ranks)
        self.gathered = tw.symmetric((2, ranks, M // ranks, K), torch.bfloat16)
        self.ready = tw.symmetric((2, ranks), torch.uint32)
        self.epoch = 0

    def __call__(self, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> None:
        self.plan(A, B, self.gathered, self.ready, C, self.epoch)
        self.epoch += 1

    def free(self) -> None:
        self.ready.free()
        self.gathered.free()


def reference(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return A of all ranks times B transposed, in fp32."""
    gathered_A = torch.empty(tw.world_size() * len(A), A.shape[1], device="cuda", dtype=A.dtype)
    if tw.world_size() > 1:
        dist.all_gather_into_tensor(gathered_A, A)
    else:
        gathered_A.copy_(A)
    return gathered_A.float() @ B.float().t()


def slowest_rank(times: list[float]) -> float:
    """Return the median of ``times`` (ms) on the slowest rank."""
    median = torch.tensor([sorted(times)[len(times) // 2]], device="cuda")
    if tw.world_size() > 1:
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def run(M: int, N_total: int, K: int, runs: int) -> bool:
    ranks = tw.world_size()
    N = N_total // ranks
    ours = AllGatherGemm(M, N, K)
    gathered_A = torch.empty(M, K, device="cuda", dtype=torch.bfloat16)
    C, D = (torch.empty(M, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def nccl(A, B, _):
        if ranks > 1:
            dist.all_gather_into_tensor(gathered_A, A)
            torch.mm(gathered_A, B.t(), out=D)
        else:
            torch.mm(A, B.t(), out=D)

    times: dict[str, list[float]] = {"ours": [], "nccl": []}
    worst = 0.0
    for run_number in range(3 + runs):
        A, B = (torch.randn(n, K, device="cuda").div_(8).bfloat16() for n in (M // ranks, N))
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
    worst = max(worst, back_to_back(ours, A, B, C, right))
    error = torch.tensor([worst], device="cuda")
    if ranks > 1:
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
    ours_ms, nccl_ms = slowest_rank(times["ours"]), slowest_rank(times["nccl"])
    if tw.rank() == 0:
        print(
            f"{M} x {N_total} x {K} bf16 on {ranks}: fused {ours_ms:.3f} ms, NCCL + cuBLAS "
            f"{nccl_ms:.3f} ms ({nccl_ms / ours_ms:.2f}x), worst relative error "
            f"{error.item():.1e} in {3 + runs} runs and 50 back to back"
        )
    ours.free()
    return error.item() <= 1e-2


def back_to_back(ours: AllGatherGemm, A, B, C, right, calls: int = 50) -> float:
    """Return the relative error of the last of many calls, without a barrier between them."""
    C.fill_(float("nan"))
    for _ in range(calls):
        ours(A, B, C)
    torch.cuda.synchronize()
    return ((C.float() - right).norm() / right.norm()).nan_to_num(nan=9.0).item()


def inputs(ranks, rng):
    """Return what `tileweave simulate` cannot invent: the number of the launch."""
    return [{"epoch": lambda epoch: epoch}] * ranks


def simulated(ranks: int = 4, schedules: int = 20) -> bool:
    """Compare a small plan on simulated ranks with NumPy; the simulator also looks for faults."""
    import ml_dtypes
    import numpy as np

    M, N, K = 64 * ranks, 64, 64
    plan, _ = all_gather_gemm(M, N, K, ranks, block_M=32, block_N=32, block_K=32)
    random = np.random.default_rng()
    inputs = [
        {
            "A": random.standard_normal((M // ranks, K)).astype(ml_dtypes.bfloat16),
            "B": random.standard_normal((N, K)).astype(ml_dtypes.bfloat16),
            "ready": np.zeros((2, ranks), np.uint32),
            "epoch": lambda epoch: epoch,
        }
        for _ in range(ranks)
    ]
    outputs = tw.simulate(plan, world_size=ranks, inputs=inputs, schedules=schedules)
    gathered_A = np.concatenate([i["A"] for i in inputs]).astype(np.float32)
    worst = 0.0
    for given, output in zip(inputs, outputs, strict=True):
        exact = gathered_A @ given["B"].astype(np.float32).T
        error = np.linalg.norm(output["C"].astype(np.float32) - exact) / np.linalg.norm(exact)
        worst = max(worst, error)
    print(
        f"{M} x {N * ranks} x {K} bf16 on {ranks} simulated ranks: {schedules} interleavings of 3 "
        f"calls without a race, deadlock or reuse, relative error {worst:.1e}"
    )
    return worst <= 1e-2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", metavar=("M", "N", "K"))
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing was timed; the plan runs in the simulator")
        ok = simulated()
    else:
        tw.init()
        shapes = options.shape or [(4096, 28672, 8192), (8192, 28672, 8192)]
        ok = all([run(*shape, options.runs) for shape in shapes])
    if not torch.cuda.is_available() or tw.rank() == 0:
        print("right" if ok else "wrong: relative error above 1e-2")
    if torch.cuda.is_available():
        tw.finalize()
    return 0 if ok else 1


# A small instance to look at: tileweave simulate examples/all_gather_gemm.py --set epoch=epoch
example, gemm = all_gather_gemm(512, 256, 128, 4, block_M=64, block_N=64, block_K=32)

if __name__ == "__main__":
    sys.exit(main())
