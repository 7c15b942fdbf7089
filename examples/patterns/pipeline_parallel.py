"""Run the stages of a network on different ranks, one microbatch after the other.

Each stage multiplies a microbatch by its weights and stores the activations at the next rank. The
compiler infers a wait for each tile of activations, so stages compute different microbatches at the
same time.

    python examples/patterns/pipeline_parallel.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, MICROBATCHES, M, D = 4, 4, 16, 64  # M: tokens of one microbatch; D: features
BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 32


def pipeline_parallel(microbatches, M, D, ranks, block_M, block_N, block_K):
    @T.prim_func
    def program(
        X: T.Tensor((microbatches, M, D), "bfloat16"),  # read on the first rank only
        weight: T.Tensor((D, D), "bfloat16"),
        Y: T.Tensor((microbatches, M, D), "bfloat16"),  # written on the last rank only
    ):
        # Blocks start in the order of their indices, so microbatch 0 is computed first.
        with T.Kernel(D // block_N, M // block_M, microbatches, threads=128) as (bx, by, batch):
            inbox = W.alloc_symmetric((microbatches, M, D), "bfloat16")
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")

            stage = W.rank()
            row, column = by * block_M, bx * block_N

            T.clear(total)
            for k in T.Pipelined(D // block_K, num_stages=2):
                if stage == 0:
                    T.copy(X[batch, row, k * block_K], A_tile)
                else:
                    T.copy(inbox[stage, batch, row, k * block_K], A_tile)
                T.copy(weight[column, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)

            for i, j in T.Parallel(block_M, block_N):
                total[i, j] = T.max(total[i, j], 0.0)
            T.copy(total, C_tile)
            if stage < ranks - 1:
                T.copy(C_tile, inbox[stage + 1, batch, row, column])
            else:
                T.copy(C_tile, Y[batch, row, column])

    return program


example = pipeline_parallel(MICROBATCHES, M, D, RANKS, BLOCK_M, BLOCK_N, BLOCK_K)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    X = rng.standard_normal((MICROBATCHES, M, D)).astype(ml_dtypes.bfloat16)
    weights = rng.standard_normal((ranks, D, D)) / np.sqrt(D)
    return [{"X": X, "weight": weight.astype(ml_dtypes.bfloat16)} for weight in weights]


def reference(inputs: list[dict]) -> list[dict]:
    Y = inputs[0]["X"].astype(np.float32)
    for rank_inputs in inputs:
        Y = np.maximum(Y @ rank_inputs["weight"].astype(np.float32).T, 0)
    return [{} for _ in inputs[:-1]] + [{"Y": Y}]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    exact = reference(given)[-1]["Y"]
    error = np.linalg.norm(outputs[-1]["Y"].astype(np.float32) - exact) / np.linalg.norm(exact)
    assert error < 2e-2
    print(f"{MICROBATCHES} microbatches passed {RANKS} stages, relative error {error:.3f}")


if __name__ == "__main__":
    main()
