"""Step 6: the program of step 3, and the finished operator, on GPUs.

torchrun --nproc-per-node=4 examples/tutorial/06_on_gpus.py
"""

import importlib

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave import ops

step_3 = importlib.import_module("03_gemm_reduce_scatter")


def relative_error(C: torch.Tensor, exact: torch.Tensor) -> float:
    return ((C.float() - exact).norm() / exact.norm()).item()


def run_on_gpus(M: int = 4096, N: int = 4096, K: int = 4096) -> None:
    tw.init()
    rank, ranks = tw.rank(), tw.world_size()
    A = torch.randn(M, K // ranks, device="cuda").bfloat16()
    B = torch.randn(N, K // ranks, device="cuda").bfloat16()
    exact = A.float() @ B.float().t()
    if ranks > 1:
        dist.all_reduce(exact)
    exact = exact.chunk(ranks)[rank]

    kernel = tw.compile(step_3.gemm_reduce_scatter(M, N, K // ranks, ranks, 128, 128, 64))
    C = torch.empty(M // ranks, N, device="cuda", dtype=torch.bfloat16)
    for _ in range(10):
        kernel(A, B, C)
    from_operator = ops.matmul_reduce_scatter(A, B.t())

    errors = relative_error(C, exact), relative_error(from_operator, exact)
    assert max(errors) < 1e-2
    print(f"rank {rank} of {ranks}: kernel {errors[0]:.3f}, operator {errors[1]:.3f}")
    kernel.free()
    tw.finalize()


def main() -> None:
    if torch.cuda.is_available():
        run_on_gpus()
    else:
        print(f"no GPU: the simulator runs the program of {step_3.RANKS} ranks; nothing is timed")
        step_3.main()


if __name__ == "__main__":
    main()
