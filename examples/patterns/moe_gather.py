"""Route tokens to experts on other ranks by reads: a mixture of experts without an all-to-all.

The rank of an expert reads the rows of its tokens from their owners and multiplies them; then the
owners read the results and add them up. The compiler infers the waits of both exchanges, although
tables decide at run time which rows are read.

    python examples/patterns/moe_gather.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

# One expert per rank. CAPACITY: tokens that an expert accepts; TOP_K: experts of a token.
RANKS, TOKENS, D, F, TOP_K, CAPACITY = 4, 4, 32, 64, 2, 16
BLOCK_T, BLOCK_M, BLOCK_N, BLOCK_K = 2, 16, 32, 16


def moe_gather(tokens, D, F, top_k, capacity, block_T, block_M, block_N, block_K):
    tiles, columns, first_gather = capacity // block_M, F // block_N, tokens // block_T
    first_gemm = first_gather + tiles * (D // block_K)
    first_combine = first_gemm + tiles * columns

    @T.prim_func
    def program(
        X: T.Tensor((tokens, D), "bfloat16"),
        weight: T.Tensor((F, D), "bfloat16"),
        token_rank: T.Tensor((capacity,), "int32"),  # owner of the token in each slot, or -1
        token_row: T.Tensor((capacity,), "int32"),  # row of the token there
        expert: T.Tensor((tokens, top_k), "int32"),  # experts of each token of this rank
        slot: T.Tensor((tokens, top_k), "int32"),  # slots of the token there
        score: T.Tensor((tokens, top_k), "float32"),  # weights of their results
        Y: T.Tensor((tokens, F), "float32"),
    ):
        # Blocks wait only for blocks of lower index, on all ranks.
        with T.Kernel(first_combine + tokens, threads=128) as block:
            rows = W.alloc_symmetric((tokens, D), "bfloat16")
            packed = W.alloc_symmetric((capacity, D), "bfloat16")
            results = W.alloc_symmetric((capacity, F), "bfloat16")
            X_tile = T.alloc_shared((block_T, D), "bfloat16")
            gathered = T.alloc_shared((block_M, block_K), "bfloat16")
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            C_tile = T.alloc_shared((block_M, block_N), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")
            result = T.alloc_shared((F,), "bfloat16")
            combined = T.alloc_fragment((F,), "float32")
            me = W.rank()
            if block < first_gather:
                T.copy(X[block * block_T, 0], X_tile)
                T.copy(X_tile, rows[me, block * block_T, 0])
            elif block < first_gemm:
                tile, k = (block - first_gather) % tiles, (block - first_gather) // tiles
                for i in T.serial(block_M):
                    owner = token_rank[tile * block_M + i]
                    if owner >= 0:  # no rank reads the results of empty slots
                        row = token_row[tile * block_M + i]
                        T.copy(rows[owner, row, k * block_K], gathered[i, :])
                T.copy(gathered, packed[me, tile * block_M, k * block_K])
            elif block < first_combine:
                tile, column = (block - first_gemm) // columns, (block - first_gemm) % columns
                T.clear(total)
                for k in T.Pipelined(D // block_K, num_stages=2):
                    T.copy(packed[me, tile * block_M, k * block_K], A_tile)
                    T.copy(weight[column * block_N, k * block_K], B_tile)
                    T.gemm(A_tile, B_tile, total, transpose_B=True)
                T.copy(total, C_tile)
                T.copy(C_tile, results[me, tile * block_M, column * block_N])
            else:
                token = block - first_combine
                T.clear(combined)
                for choice in T.serial(top_k):
                    T.copy(results[expert[token, choice], slot[token, choice], 0], result)
                    for j in T.Parallel(F):
                        combined[j] += score[token, choice] * result[j]
                T.copy(combined, Y[token, 0])

    return program


example = moe_gather(TOKENS, D, F, TOP_K, CAPACITY, BLOCK_T, BLOCK_M, BLOCK_N, BLOCK_K)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    given = [
        {
            "X": rng.standard_normal((TOKENS, D)).astype(ml_dtypes.bfloat16),
            "weight": (rng.standard_normal((F, D)) / 8).astype(ml_dtypes.bfloat16),
            "token_rank": np.full(CAPACITY, -1, np.int32),
            "token_row": np.full(CAPACITY, -1, np.int32),
            "expert": rng.permuted(np.tile(np.arange(ranks), (TOKENS, 1)), axis=1)
            .astype(np.int32)[:, :TOP_K].copy(),
            "slot": np.zeros((TOKENS, TOP_K), np.int32),
            "score": rng.dirichlet(np.ones(TOP_K), TOKENS).astype(np.float32),
        }
        for _ in range(ranks)
    ]  # fmt: skip
    filled = [0] * ranks
    for rank, row, choice in np.ndindex(ranks, TOKENS, TOP_K):
        expert = given[rank]["expert"][row, choice]
        given[rank]["slot"][row, choice] = filled[expert]
        given[expert]["token_rank"][filled[expert]] = rank
        given[expert]["token_row"][filled[expert]] = row
        filled[expert] += 1
    return given


def reference(inputs: list[dict]) -> list[dict]:
    weights = np.stack([rank_inputs["weight"] for rank_inputs in inputs]).astype(np.float32)
    return [
        {
            "Y": np.einsum(
                "tk,tkfd,td->tf",
                rank_inputs["score"],
                weights[rank_inputs["expert"]],
                rank_inputs["X"].astype(np.float32),
            )
        }
        for rank_inputs in inputs
    ]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    Y, exact = (np.stack([o["Y"] for o in results]) for results in (outputs, reference(given)))
    error = np.linalg.norm(Y - exact) / np.linalg.norm(exact)
    assert error < 2e-2
    print(f"{RANKS} ranks routed {TOKENS} tokens each, relative error {error:.3f}")


if __name__ == "__main__":
    main()
