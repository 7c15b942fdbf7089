"""Compute the SwiGLU MLP of a tensor-parallel transformer, with the reduce-scatter of its result.

Each rank holds some of the hidden features. One kernel computes them, with the gate as epilogue;
the other multiplies them by the down projection and adds the products of all ranks. The compiler
infers one counter per tile that ranks exchange.

    python examples/patterns/gemm_gate_reduce_scatter.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, M, D, F = 4, 64, 64, 32  # M: tokens; D: features; F: hidden features of one rank
BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 32
BF16 = "bfloat16"


def gemm_gate(M, D, F, block_M, block_N, block_K):
    @T.prim_func
    def gemm_gate(
        X: T.Tensor((M, D), BF16),
        gate_weight: T.Tensor((F, D), BF16),
        up_weight: T.Tensor((F, D), BF16),
        hidden: T.Tensor((M, F), BF16),
    ):
        with T.Kernel(F // block_N, M // block_M, threads=128) as (column, row):
            X_tile = T.alloc_shared((block_M, block_K), BF16)
            gate_tile = T.alloc_shared((block_N, block_K), BF16)
            up_tile = T.alloc_shared((block_N, block_K), BF16)
            hidden_tile = T.alloc_shared((block_M, block_N), BF16)
            gate = T.alloc_fragment((block_M, block_N), "float32")
            up = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(gate)
            T.clear(up)
            for k in T.Pipelined(D // block_K, num_stages=2):
                T.copy(X[row * block_M, k * block_K], X_tile)
                T.copy(gate_weight[column * block_N, k * block_K], gate_tile)
                T.copy(up_weight[column * block_N, k * block_K], up_tile)
                T.gemm(X_tile, gate_tile, gate, transpose_B=True)
                T.gemm(X_tile, up_tile, up, transpose_B=True)
            for i, j in T.Parallel(block_M, block_N):
                up[i, j] *= gate[i, j] / (1.0 + T.exp(-gate[i, j]))
            T.copy(up, hidden_tile)
            T.copy(hidden_tile, hidden[row * block_M, column * block_N])

    return gemm_gate


def gemm_reduce_scatter(M, N, K, ranks, block_M, block_N, block_K):
    rows_per_rank = M // ranks
    rows, columns = rows_per_rank // block_M, N // block_N

    @T.prim_func
    def gemm_reduce_scatter(
        A: T.Tensor((M, K), BF16),
        B: T.Tensor((N, K), BF16),
        C: T.Tensor((rows_per_rank, N), BF16),
    ):
        with T.Kernel(rows * columns * ranks, threads=128) as block:
            parts = W.alloc_symmetric((ranks, rows_per_rank, N), BF16)  # one part per source rank
            A_tile = T.alloc_shared((block_M, block_K), BF16)
            B_tile = T.alloc_shared((block_N, block_K), BF16)
            C_tile = T.alloc_shared((block_M, block_N), BF16)
            total = T.alloc_fragment((block_M, block_N), "float32")
            me = W.rank()
            owner, tile = W.swizzle_ranks(block, rows * columns, me, ranks)
            row, column = tile // columns * block_M, tile % columns * block_N
            T.clear(total)
            for k in T.Pipelined(K // block_K, num_stages=2):
                T.copy(A[owner * rows_per_rank + row, k * block_K], A_tile)
                T.copy(B[column, k * block_K], B_tile)
                T.gemm(A_tile, B_tile, total, transpose_B=True)
            if owner != me:
                T.copy(total, C_tile)
                T.copy(C_tile, parts[owner, me, row, column])
            else:
                for step in T.serial(ranks - 1):
                    T.copy(parts[me, (me + ranks - 1 - step) % ranks, row, column], C_tile)
                    for i, j in T.Parallel(block_M, block_N):
                        total[i, j] += C_tile[i, j]
                T.copy(total, C_tile)
                T.copy(C_tile, C[row, column])

    return gemm_reduce_scatter


def tensor_parallel_mlp(M, D, F, ranks, gate_kernel, reduce_scatter_kernel):
    @tw.plan
    def mlp(
        p: tw.PlanBuilder,
        X: T.Tensor((M, D), BF16),
        gate_weight: T.Tensor((F, D), BF16),
        up_weight: T.Tensor((F, D), BF16),
        down_weight: T.Tensor((D, F), BF16),
        hidden: T.Tensor((M, F), BF16),
        Y: T.Tensor((M // ranks, D), BF16),
    ):
        p.launch(gate_kernel, X, gate_weight, up_weight, hidden)
        p.launch(reduce_scatter_kernel, hidden, down_weight, Y)

    return mlp


gate_kernel = gemm_gate(M, D, F, BLOCK_M, BLOCK_N, BLOCK_K)
reduce_scatter_kernel = gemm_reduce_scatter(M, D, F, RANKS, BLOCK_M, BLOCK_N, BLOCK_K)
example = tensor_parallel_mlp(M, D, F, RANKS, gate_kernel, reduce_scatter_kernel)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    X = rng.standard_normal((M, D)).astype(ml_dtypes.bfloat16)
    shapes = {"gate_weight": (F, D), "up_weight": (F, D), "down_weight": (D, F)}

    def weights() -> dict:
        scaled = {name: rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
        return {name: weight.astype(ml_dtypes.bfloat16) for name, weight in scaled.items()}

    return [{"X": X, **weights()} for _ in range(ranks)]


def reference(inputs: list[dict]) -> list[dict]:
    total = np.zeros((M, D))
    for rank_inputs in inputs:
        values = {name: value.astype(np.float64) for name, value in rank_inputs.items()}
        gate, up = (values["X"] @ values[name].T for name in ("gate_weight", "up_weight"))
        total += (gate / (1 + np.exp(-gate)) * up) @ values["down_weight"].T
    return [{"Y": part} for part in np.split(total, RANKS)]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    Y = np.concatenate([output["Y"] for output in outputs]).astype(np.float32)
    exact = np.concatenate([output["Y"] for output in reference(given)])
    error = np.linalg.norm(Y - exact) / np.linalg.norm(exact)
    assert error < 2e-2
    print(f"{RANKS} ranks computed the MLP of {M} tokens, relative error {error:.3f}")


if __name__ == "__main__":
    main()
