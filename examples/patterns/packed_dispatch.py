"""Dispatch tokens to experts on all ranks, and multiply them: packed rows and a grouped GEMM.

The ranks exchange how many tokens they have for each expert. Then every rank knows where its rows
begin on every rank. The rows of an expert are therefore adjacent, no matter which rank they come
from, and the GEMM of an expert multiplies whole tiles of them.

    python examples/patterns/packed_dispatch.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

# EXPERTS: experts of each rank. TOP_K: experts of each token.
RANKS, EXPERTS, TOKENS, D, F, TOP_K = 4, 2, 4, 32, 64, 2
BLOCK_M, BLOCK_N, BLOCK_K = 16, 32, 16


def capacity_of(ranks, tokens, experts, top_k, block_M):
    """Return the rows of a rank that are sufficient for every routing, in whole tiles."""
    rows = ranks * tokens * top_k + experts * (block_M - 1)
    return -(-rows // block_M) * block_M


@T.macro
def locate(table, me, first, received, begin, ranks, experts, block_M):
    """Compute the first row of this rank for each owner and expert, and for each expert of this
    rank the number of rows and the first tile."""
    row = T.alloc_local((1,), "int32")
    start = T.alloc_local((1,), "int32")
    for owner in T.serial(ranks):
        row[0] = 0
        for e in T.serial(experts):
            start[0] = row[0]
            for source in T.serial(ranks):
                if source == me:
                    first[owner * experts + e] = row[0]
                row[0] += table[source, owner, e]
            if owner == me:
                received[e] = row[0] - start[0]
                begin[e] = start[0] // block_M
            row[0] = T.ceildiv(row[0], block_M) * block_M
        if owner == me:
            begin[experts] = row[0] // block_M


def packed_dispatch(ranks, experts, tokens, D, F, top_k, block_M, block_N, block_K):
    capacity, columns = capacity_of(ranks, tokens, experts, top_k, block_M), F // block_N
    tiles, first_gemm = capacity // block_M, 1 + tokens

    @T.prim_func
    def program(
        X: T.Tensor((tokens, D), "bfloat16"),
        weight: T.Tensor((experts, F, D), "bfloat16"),
        owner: T.Tensor((tokens, top_k), "int32"),  # ranks of the experts of each token
        expert: T.Tensor((tokens, top_k), "int32"),  # numbers of the experts there
        slot: T.Tensor((tokens, top_k), "int32"),  # number of the row among those for the expert
        sent: T.Tensor((ranks, experts), "int32"),  # rows of this rank for each expert
        Y: T.Tensor((capacity, F), "float32"),
    ):
        # Blocks wait only for blocks of lower index, on all ranks.
        with T.Kernel(first_gemm + tiles * columns, threads=128) as block:
            counts = W.alloc_symmetric((ranks, ranks, experts), "int32")
            inbox = W.alloc_packed(rows=capacity, row=D, dtype="bfloat16")
            table = T.alloc_shared((ranks, ranks, experts), "int32")
            first = T.alloc_local((ranks * experts,), "int32")
            received = T.alloc_local((experts,), "int32")
            begin = T.alloc_local((experts + 1,), "int32")
            row = T.alloc_shared((1, D), "bfloat16")
            A_tile = T.alloc_shared((block_M, block_K), "bfloat16")
            B_tile = T.alloc_shared((block_N, block_K), "bfloat16")
            total = T.alloc_fragment((block_M, block_N), "float32")
            me = W.rank()
            if block == 0:
                for peer in T.serial(ranks):
                    for i, e in T.Parallel(ranks, experts):
                        counts[peer, me, i, e] = sent[i, e]
            for source in T.serial(ranks):
                T.copy(counts[me, source, 0, 0], table[source, :, :])
            locate(table, me, first, received, begin, ranks, experts, block_M)
            if block == 0:
                for e in T.serial(experts):
                    end = begin[e] * block_M + received[e]
                    W.pad(inbox[me, end, 0], begin[e + 1] * block_M - end)
                W.pad(inbox[me, begin[experts] * block_M, 0], capacity - begin[experts] * block_M)
            elif block < first_gemm:
                token = block - 1
                T.copy(X[token, 0], row)
                for choice in T.serial(top_k):
                    dst, e = owner[token, choice], expert[token, choice]
                    T.copy(row, inbox[dst, first[dst * experts + e] + slot[token, choice], 0])
            else:
                tile, column = (block - first_gemm) // columns, (block - first_gemm) % columns
                for e in T.serial(experts):
                    if begin[e] <= tile and tile < begin[e + 1]:
                        T.clear(total)
                        for k in T.serial(D // block_K):
                            T.copy(inbox[me, tile * block_M, k * block_K], A_tile)
                            T.copy(weight[e, column * block_N, k * block_K], B_tile)
                            T.gemm(A_tile, B_tile, total, transpose_B=True)
                        for i, j in T.Parallel(block_M, block_N):
                            if (tile - begin[e]) * block_M + i < received[e]:  # else padding
                                Y[tile * block_M + i, column * block_N + j] = total[i, j]

    return program


example = packed_dispatch(RANKS, EXPERTS, TOKENS, D, F, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    given = []
    for _ in range(ranks):
        chosen = rng.permuted(np.tile(np.arange(ranks * EXPERTS), (TOKENS, 1)), axis=1)[:, :TOP_K]
        slot, sent = np.zeros_like(chosen), np.zeros(ranks * EXPERTS, np.int32)
        for choice, e in np.ndenumerate(chosen):
            slot[choice] = sent[e]
            sent[e] += 1
        given.append({
            "X": rng.standard_normal((TOKENS, D)).astype(ml_dtypes.bfloat16),
            "weight": (rng.standard_normal((EXPERTS, F, D)) / 8).astype(ml_dtypes.bfloat16),
            "owner": (chosen // EXPERTS).astype(np.int32),
            "expert": (chosen % EXPERTS).astype(np.int32),
            "slot": slot.astype(np.int32),
            "sent": sent.reshape(ranks, EXPERTS),
            "Y": np.zeros((capacity_of(ranks, TOKENS, EXPERTS, TOP_K, BLOCK_M), F), np.float32),
        })  # fmt: skip
    return given


def reference(inputs: list[dict]) -> list[dict]:
    expected = []
    for rank, given in enumerate(inputs):
        Y, start = np.zeros_like(given["Y"]), 0
        for e, weight in enumerate(given["weight"].astype(np.float32)):
            for source in inputs:
                token, choice = np.nonzero((source["owner"] == rank) & (source["expert"] == e))
                rows = start + source["slot"][token, choice]
                Y[rows] = source["X"][token].astype(np.float32) @ weight.T
                start += len(rows)
            start = -(-start // BLOCK_M) * BLOCK_M
        expected.append({"Y": Y})
    return expected


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    Y, exact = (np.stack([o["Y"] for o in results]) for results in (outputs, reference(given)))
    error = np.linalg.norm(Y - exact) / np.linalg.norm(exact)
    assert error < 2e-2
    print(f"{RANKS} ranks sent {TOKENS} tokens each to {TOP_K} experts, relative error {error:.3f}")


if __name__ == "__main__":
    main()
