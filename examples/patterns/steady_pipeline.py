"""Keep the stages of a network busy: one kernel streams all microbatches through its rank.

Each block keeps its columns of the weights in shared memory. In tick t, stage s multiplies
microbatch t - s, which stage s - 1 has sent in tick t - 1. The compiler infers the waits, and gives
each tick a copy of the inbox.

    python examples/patterns/steady_pipeline.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
MICROBATCHES, M, D, BLOCK_N = 6, 16, 64, 32  # M: tokens of one microbatch; D: features


def steady_pipeline(batches, M, D, ranks, block_N):
    @T.prim_func
    def program(
        X: T.Tensor((batches, M, D), "bfloat16"),  # read on the first rank only
        weight: T.Tensor((D, D), "bfloat16"),
        Y: T.Tensor((batches, M, D), "bfloat16"),  # written on the last rank only
    ):
        with T.Kernel(D // block_N, threads=128) as block:
            inbox = W.alloc_symmetric((M, D), "bfloat16")
            weight_tile = T.alloc_shared((block_N, D), "bfloat16")
            A_tile = T.alloc_shared((M, D), "bfloat16")
            C_tile = T.alloc_shared((M, block_N), "bfloat16")
            total = T.alloc_fragment((M, block_N), "float32")
            stage, column = W.rank(), block * block_N
            T.copy(weight[column, 0], weight_tile)
            for tick in T.serial(batches + ranks - 1):
                batch = tick - stage
                if batch >= 0 and batch < batches:
                    if stage == 0:
                        T.copy(X[batch, 0, 0], A_tile)
                    else:
                        T.copy(inbox[stage, 0, 0], A_tile)
                    T.clear(total)
                    T.gemm(A_tile, weight_tile, total, transpose_B=True)
                    for i, j in T.Parallel(M, block_N):
                        total[i, j] = T.max(total[i, j], 0.0)
                    T.copy(total, C_tile)
                    if stage < ranks - 1:
                        T.copy(C_tile, inbox[stage + 1, 0, column])
                    else:
                        T.copy(C_tile, Y[batch, 0, column])

    return program


example = steady_pipeline(MICROBATCHES, M, D, RANKS, BLOCK_N)


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
    print(f"one launch sent {MICROBATCHES} microbatches through {RANKS} stages, error {error:.3f}")


if __name__ == "__main__":
    main()
