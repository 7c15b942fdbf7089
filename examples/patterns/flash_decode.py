"""Flash-decode: keys and values of each sequence are split over ranks, which merge their outputs.

Each rank writes its output and log-sum-exp to all ranks. The compiler infers a signal and a wait
for each pair of sequence and key head, although the number of keys is known only at run time.

    python examples/patterns/flash_decode.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
BATCH, HEADS, KV_HEADS, KEYS, DIM = 2, 32, 2, 64, 32
LOWEST = -1e30  # log-sum-exp of no keys


@T.macro
def attend(Q_tile, K_tile, V_tile, keys, scale, out, highest, total):
    """Add the first ``keys`` keys of a tile to the output, the maxima and the sums of a softmax."""
    scores = T.alloc_fragment((Q_tile.shape[0], K_tile.shape[0]), "float32")
    weights = T.alloc_shared(scores.shape, Q_tile.dtype)
    before = T.alloc_fragment(highest.shape, "float32")
    added = T.alloc_fragment(highest.shape, "float32")
    T.clear(scores)
    T.gemm(Q_tile, K_tile, scores, transpose_B=True)
    for i, j in T.Parallel(*scores.shape):
        scaled = scores[i, j] * scale
        scores[i, j] = T.if_then_else(j < keys, scaled, LOWEST)
    T.copy(highest, before)
    T.reduce_max(scores, highest, dim=1, clear=False)
    for i, j in T.Parallel(*scores.shape):
        scores[i, j] = T.exp(scores[i, j] - highest[i])
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(highest.shape[0]):
        total[i] = total[i] * T.exp(before[i] - highest[i]) + added[i]
    for i, j in T.Parallel(*out.shape):
        out[i, j] *= T.exp(before[i] - highest[i])
    T.copy(scores, weights)
    T.gemm(weights, V_tile, out)


@T.macro
def normalize(out, highest, total, lse):
    """Divide the output by the sums, and compute the log-sum-exp; without keys, 0 and LOWEST."""
    for i in T.Parallel(lse.shape[0]):
        lse[i] = T.if_then_else(total[i] > 0.0, highest[i] + T.log(total[i]), LOWEST)
    for i, j in T.Parallel(*out.shape):
        out[i, j] /= T.max(total[i], 1e-30)


def flash_decode(batch, heads, kv_heads, keys, dim, ranks, block=32):
    """Out (batch, heads, dim): attention of one query a sequence to the keys of all ranks.

    lengths (batch,): the number of keys of each sequence on this rank, at most ``keys``.
    """
    group = heads // kv_heads  # query heads of one key head
    scale = dim**-0.5

    @T.prim_func
    def program(
        Q: T.Tensor((batch, heads, dim), "bfloat16"),
        K: T.Tensor((batch, keys, kv_heads, dim), "bfloat16"),
        V: T.Tensor((batch, keys, kv_heads, dim), "bfloat16"),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), "float32"),
    ):
        with T.Kernel(kv_heads, batch, threads=128) as (kv_head, b):
            outs = W.alloc_symmetric((ranks, batch, heads, dim), "float32")
            sums = W.alloc_symmetric((ranks, batch, heads), "float32")
            Q_tile = T.alloc_shared((group, dim), "bfloat16")
            K_tile = T.alloc_shared((block, dim), "bfloat16")
            V_tile = T.alloc_shared((block, dim), "bfloat16")
            seen = T.alloc_shared((ranks, group), "float32")
            out = T.alloc_fragment((group, dim), "float32")
            highest = T.alloc_fragment((group,), "float32")
            total = T.alloc_fragment((group,), "float32")
            lse = T.alloc_fragment((group,), "float32")
            me, head = W.rank(), kv_head * group

            T.copy(Q[b, head, 0], Q_tile)
            T.clear(out)
            T.clear(total)
            T.fill(highest, LOWEST)
            # T.Pipelined with an extent from memory does not compile for sm_80 in TileLang 0.1.15.
            for k in T.serial(T.ceildiv(lengths[b], block)):
                T.copy(K[b, k * block : (k + 1) * block, kv_head, :], K_tile)
                T.copy(V[b, k * block : (k + 1) * block, kv_head, :], V_tile)
                attend(Q_tile, K_tile, V_tile, lengths[b] - k * block, scale, out, highest, total)

            normalize(out, highest, total, lse)
            for step in T.serial(ranks):
                T.copy(lse, sums[(me + 1 + step) % ranks, me, b, head])
                T.copy(out, outs[(me + 1 + step) % ranks, me, b, head, 0])

            T.copy(sums[me, 0:ranks, b, head : head + group], seen)
            T.clear(out)
            T.clear(total)
            for source in T.serial(ranks):
                for i in T.Parallel(group):
                    highest[i] = T.max(highest[i], seen[source, i])
            for source in T.serial(ranks):
                for i in T.Parallel(group):
                    lse[i] = T.exp(seen[source, i] - highest[i])
                    total[i] += lse[i]
                for i, j in T.Parallel(group, dim):
                    out[i, j] += outs[me, source, b, head + i, j] * lse[i]
            for i, j in T.Parallel(group, dim):
                Out[b, head + i, j] = out[i, j] / total[i]

    return program


example = flash_decode(BATCH, HEADS, KV_HEADS, KEYS, DIM, RANKS)


def inputs(ranks, rng):
    Q = rng.standard_normal((BATCH, HEADS, DIM)).astype(ml_dtypes.bfloat16)
    K, V = rng.standard_normal((2, ranks, BATCH, KEYS, KV_HEADS, DIM)).astype(Q.dtype)
    lengths = rng.integers(1, KEYS + 1, (ranks, BATCH)).astype(np.int32)
    lengths[-1, 0] = 0  # a rank without keys of the first sequence
    return [{"Q": Q, "K": K[r], "V": V[r], "lengths": lengths[r]} for r in range(ranks)]


def reference(inputs):
    Q = inputs[0]["Q"].astype(np.float32)
    group = HEADS // KV_HEADS
    Out = np.empty_like(Q)
    for b in range(BATCH):
        keys, values = (
            np.concatenate([rank[name][b, : rank["lengths"][b]] for rank in inputs])
            .astype(np.float32)
            .repeat(group, axis=1)
            for name in "KV"
        )
        weights = np.exp(np.einsum("hd,nhd->hn", Q[b], keys) * DIM**-0.5)
        weights /= weights.sum(axis=1, keepdims=True)
        Out[b] = np.einsum("hn,nhd->hd", weights, values)
    return [{"Out": Out} for _ in inputs]


def main():
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=3)
    for output, expected in zip(outputs, reference(given), strict=True):
        np.testing.assert_allclose(output["Out"], expected["Out"], rtol=2e-2, atol=1e-2)
    print(f"each of {RANKS} ranks has the output of {BATCH} sequences")


if __name__ == "__main__":
    main()
