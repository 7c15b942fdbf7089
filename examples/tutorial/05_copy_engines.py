"""Step 5: a plan. Copy engines gather A while one kernel multiplies what has arrived.

python examples/tutorial/05_copy_engines.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, ROWS, N, K, BLOCK = 4, 32, 64, 32, 32  # ROWS: one rank's rows of A


@T.prim_func
def gemm(
    gathered: W.Symmetric((RANKS, ROWS, K), "bfloat16"),
    B: T.Tensor((N, K), "bfloat16"),
    C: T.Tensor((RANKS, ROWS, N), "bfloat16"),
):
    with T.Kernel(N // BLOCK, RANKS, threads=128) as (column, step):
        A_tile = T.alloc_shared((ROWS, K), "bfloat16")
        B_tile = T.alloc_shared((BLOCK, K), "bfloat16")
        C_tile = T.alloc_shared((ROWS, BLOCK), "bfloat16")
        total = T.alloc_fragment((ROWS, BLOCK), "float32")
        me = W.rank()
        source = (me + RANKS - step) % RANKS  # own rows first, then in the order of arrival
        T.clear(total)
        T.copy(gathered[me, source, 0, 0], A_tile)
        T.copy(B[column * BLOCK, 0], B_tile)
        T.gemm(A_tile, B_tile, total, transpose_B=True)
        T.copy(total, C_tile)
        T.copy(C_tile, C[source, 0, column * BLOCK])


@tw.plan
def all_gather_gemm(
    p: tw.PlanBuilder,
    A: T.Tensor((ROWS, K), "bfloat16"),
    gathered: W.Symmetric((RANKS, ROWS, K), "bfloat16"),
    B: T.Tensor((N, K), "bfloat16"),
    C: T.Tensor((RANKS, ROWS, N), "bfloat16"),
):
    for peer in p.peers():
        p.copy(gathered[peer, p.rank], A, stream="copies")
    p.copy(gathered[p.rank, p.rank], A)
    p.launch(gemm, gathered, B, C)


def main() -> None:
    random = np.random.default_rng(0)
    inputs = [
        {
            "A": random.standard_normal((ROWS, K)).astype(ml_dtypes.bfloat16),
            "B": random.standard_normal((N, K)).astype(ml_dtypes.bfloat16),
        }
        for _ in range(RANKS)
    ]
    outputs = tw.simulate(all_gather_gemm, world_size=RANKS, inputs=inputs, schedules=10)
    A = np.stack([i["A"] for i in inputs]).astype(np.float32)
    for rank, output in enumerate(outputs):
        exact = A @ inputs[rank]["B"].astype(np.float32).T
        error = np.linalg.norm(output["C"].astype(np.float32) - exact) / np.linalg.norm(exact)
        assert error < 1e-2
        print(f"rank {rank}: relative error {error:.3f}")


if __name__ == "__main__":
    main()
