"""Step 3: GEMM + reduce-scatter in one kernel.

python examples/tutorial/03_gemm_reduce_scatter.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, M, N, K = 4, 128, 64, 32  # K: one rank's part of the inner dimension


def gemm_reduce_scatter(M, N, K, ranks, block_M, block_N, block_K):
    rows_per_rank = M // ranks
    rows, columns = rows_per_rank // block_M, N // block_N
    tiles = rows * columns  # tiles of C that one rank owns

    @T.prim_func
    def program(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((N, K), "bfloat16"),
        C: T.Tensor((rows_per_rank, N), "bfloat16"),
    ):
        with T.Kernel(tiles * ranks, threads=128) as block:
            parts = W.alloc_symmetric((M, N), "bfloat16")
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, tiles, me, ranks)
            row, column = W.swizzle_2d(tile, rows, columns)

            T.clear(total)
            for k in T.Pipelined(K // block_K, num_stages=2):
                T.copy(A[owner * rows_per_rank + row * block_M, k * block_K], A_tile)
                T.copy(B[column * block_N, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)

            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me * rows_per_rank + row * block_M, column * block_N])
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks
                    T.copy(
                        parts[me, source * rows_per_rank + row * block_M, column * block_N], C_tile
                    )
                    for i, j in T.Parallel(block_M, block_N):
                        total[i, j] += C_tile[i, j]
                T.copy(total, C_tile)
                T.copy(C_tile, C[row * block_M, column * block_N])

    return program


example = gemm_reduce_scatter(M, N, K, RANKS, block_M=32, block_N=32, block_K=16)


def main() -> None:
    random = np.random.default_rng(0)
    inputs = [
        {
            "A": random.standard_normal((M, K)).astype(ml_dtypes.bfloat16),
            "B": random.standard_normal((N, K)).astype(ml_dtypes.bfloat16),
        }
        for _ in range(RANKS)
    ]
    outputs = tw.simulate(example, world_size=RANKS, inputs=inputs, schedules=5)
    C = np.concatenate([output["C"] for output in outputs]).astype(np.float32)
    exact = sum(i["A"].astype(np.float32) @ i["B"].astype(np.float32).T for i in inputs)
    error = np.linalg.norm(C - exact) / np.linalg.norm(exact)
    assert error < 1e-2
    print(f"C is the sum of {RANKS} products, relative error {error:.3f}")


if __name__ == "__main__":
    main()
