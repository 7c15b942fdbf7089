"""All-reduce + residual + RMSNorm of any number of tokens, one block for each token.

The compiler infers one signal and one wait for each token and source rank, and compiles and proves
the program for each number of tokens that it is called with.

    python examples/patterns/all_reduce_rms_norm.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
HIDDEN = 128
SIZES = [{"tokens": 5}, {"tokens": 1}]
EPSILON = 1e-6


def all_reduce_rms_norm(hidden, ranks, epsilon=EPSILON):
    """new_residual = residual + sum of X over ranks; Y = RMSNorm(new_residual) * weight."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def program(
        X: T.Tensor((tokens, hidden), "bfloat16"),
        residual: T.Tensor((tokens, hidden), "bfloat16"),
        weight: T.Tensor((hidden,), "bfloat16"),
        new_residual: T.Tensor((tokens, hidden), "bfloat16"),
        Y: T.Tensor((tokens, hidden), "bfloat16"),
    ):
        with T.Kernel(tokens, threads=128) as token:
            parts = W.alloc_symmetric((ranks, tokens, hidden), "bfloat16")
            row = T.alloc_shared((1, hidden), "bfloat16")
            total = T.alloc_fragment((1, hidden), "float32")
            squares = T.alloc_fragment((1, hidden), "float32")
            mean = T.alloc_fragment((1,), "float32")
            me = W.rank()

            T.copy(X[token, 0], row)
            for step in T.serial(ranks):
                T.copy(row, parts[(me + 1 + step) % ranks, me, token, 0])

            T.copy(residual[token, 0], total)
            for source in T.serial(ranks):
                for i, j in T.Parallel(1, hidden):
                    total[i, j] += parts[me, source, token, j]
            T.copy(total, new_residual[token, 0])

            for i, j in T.Parallel(1, hidden):
                squares[i, j] = total[i, j] * total[i, j]
            T.reduce_sum(squares, mean, dim=1)
            for i, j in T.Parallel(1, hidden):
                total[i, j] *= T.rsqrt(mean[i] / hidden + epsilon) * weight[j]
            T.copy(total, Y[token, 0])

    return program


example = all_reduce_rms_norm(HIDDEN, RANKS)


def inputs(ranks, rng, tokens=5):
    X, residual = rng.standard_normal((2, ranks, tokens, HIDDEN)).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal(HIDDEN).astype(ml_dtypes.bfloat16)
    return [{"X": part, "residual": residual[0], "weight": weight} for part in X]


def reference(inputs):
    total = sum(rank["X"].astype(np.float32) for rank in inputs)
    total += inputs[0]["residual"].astype(np.float32)
    scale = 1 / np.sqrt((total**2).mean(axis=1, keepdims=True) + EPSILON)
    Y = total * scale * inputs[0]["weight"].astype(np.float32)
    return [{"new_residual": total, "Y": Y} for _ in inputs]


def main():
    for size in SIZES:
        given = inputs(RANKS, np.random.default_rng(0), **size)
        outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=3)
        for output, expected in zip(outputs, reference(given), strict=True):
            for name, value in expected.items():
                np.testing.assert_allclose(output[name].astype(np.float32), value, 2e-2, 1e-2)
    print(f"residual and RMSNorm are right for {len(SIZES)} numbers of tokens")


if __name__ == "__main__":
    main()
