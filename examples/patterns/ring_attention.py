"""Ring attention: keys and values travel around the ring, while each rank attends to them.

In ``serial``, the compiler gives each step its own copy of the receiving memory; in ``pipelined``,
it infers the waits of a pipelined loop on chunks that other blocks forward.

    python examples/patterns/ring_attention.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
HEADS, ROWS, DIM = 2, 64, 32  # ROWS: of queries and of keys of one rank


@T.macro
def attend(Q_tile, K_tile, V_tile, scale, out, highest, total):
    """Add a tile of keys to the output, the maxima and the sums of a softmax."""
    scores = T.alloc_fragment((Q_tile.shape[0], K_tile.shape[0]), "float32")
    weights = T.alloc_shared(scores.shape, Q_tile.dtype)
    before = T.alloc_fragment(highest.shape, "float32")
    added = T.alloc_fragment(highest.shape, "float32")
    T.clear(scores)
    T.gemm(Q_tile, K_tile, scores, transpose_B=True)
    T.copy(highest, before)
    T.reduce_max(scores, highest, dim=1, clear=False)
    for i, j in T.Parallel(*scores.shape):
        scores[i, j] = T.exp((scores[i, j] - highest[i]) * scale)
    T.reduce_sum(scores, added, dim=1)
    for i in T.Parallel(highest.shape[0]):
        total[i] = total[i] * T.exp((before[i] - highest[i]) * scale) + added[i]
    for i, j in T.Parallel(*out.shape):
        out[i, j] *= T.exp((before[i] - highest[i]) * scale)
    T.copy(scores, weights)
    T.gemm(weights, V_tile, out)


def ring_attention(heads, rows, dim, ranks):
    """Out (heads, rows, dim): attention to the keys of all ranks, one block for each head.

    Each step attends to a chunk, then sends it to the right neighbor.
    """

    @T.prim_func
    def program(
        Q: T.Tensor((heads, rows, dim), "bfloat16"),
        K: T.Tensor((heads, rows, dim), "bfloat16"),
        V: T.Tensor((heads, rows, dim), "bfloat16"),
        Out: T.Tensor((heads, rows, dim), "float32"),
    ):
        with T.Kernel(heads, threads=128) as head:
            chunk = W.alloc_symmetric((2, heads, rows, dim), "bfloat16")
            Q_tile = T.alloc_shared((rows, dim), "bfloat16")
            K_tile = T.alloc_shared((rows, dim), "bfloat16")
            V_tile = T.alloc_shared((rows, dim), "bfloat16")
            out = T.alloc_fragment((rows, dim), "float32")
            highest = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            me, right = W.rank(), (W.rank() + 1) % ranks

            T.copy(Q[head, 0, 0], Q_tile)
            T.copy(K[head, 0, 0], K_tile)
            T.copy(V[head, 0, 0], V_tile)
            T.clear(out)
            T.clear(total)
            T.fill(highest, -T.infinity("float32"))
            for step in T.serial(ranks):
                attend(Q_tile, K_tile, V_tile, dim**-0.5, out, highest, total)
                if step < ranks - 1:
                    T.copy(K_tile, chunk[right, 0, head, 0, 0])
                    T.copy(V_tile, chunk[right, 1, head, 0, 0])
                    T.copy(chunk[me, 0, head, 0, 0], K_tile)
                    T.copy(chunk[me, 1, head, 0, 0], V_tile)
            for i, j in T.Parallel(rows, dim):
                Out[head, i, j] = out[i, j] / total[i]

    return program


def pipelined_ring_attention(heads, rows, dim, ranks, block=32):
    """Out as above. One block for each head forwards tiles, and the others attend to them."""
    tiles = rows // block

    @T.prim_func
    def program(
        Q: T.Tensor((heads, rows, dim), "bfloat16"),
        K: T.Tensor((heads, rows, dim), "bfloat16"),
        V: T.Tensor((heads, rows, dim), "bfloat16"),
        Out: T.Tensor((heads, rows, dim), "float32"),
    ):
        with T.Kernel(heads, 1 + tiles, threads=128) as (head, index):
            keys = W.alloc_symmetric((ranks, heads, rows, dim), "bfloat16")
            values = W.alloc_symmetric((ranks, heads, rows, dim), "bfloat16")
            tile = T.alloc_shared((block, dim), "bfloat16")
            Q_tile = T.alloc_shared((block, dim), "bfloat16")
            K_tile = T.alloc_shared((block, dim), "bfloat16")
            V_tile = T.alloc_shared((block, dim), "bfloat16")
            out = T.alloc_fragment((block, dim), "float32")
            highest = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            me, right = W.rank(), (W.rank() + 1) % ranks

            if index == 0:
                for step in T.serial(tiles):
                    T.copy(K[head, step * block, 0], tile)
                    T.copy(tile, keys[me, me, head, step * block, 0])
                    T.copy(V[head, step * block, 0], tile)
                    T.copy(tile, values[me, me, head, step * block, 0])
                for step in T.serial((ranks - 1) * tiles):
                    source, row = (me + ranks - step // tiles) % ranks, step % tiles * block
                    T.copy(keys[me, source, head, row, 0], tile)
                    T.copy(tile, keys[right, source, head, row, 0])
                    T.copy(values[me, source, head, row, 0], tile)
                    T.copy(tile, values[right, source, head, row, 0])
            else:
                T.copy(Q[head, (index - 1) * block, 0], Q_tile)
                T.clear(out)
                T.clear(total)
                T.fill(highest, -T.infinity("float32"))
                for step in T.Pipelined(ranks * tiles, num_stages=2):
                    source, row = (me + ranks - step // tiles) % ranks, step % tiles * block
                    T.copy(keys[me, source, head, row, 0], K_tile)
                    T.copy(values[me, source, head, row, 0], V_tile)
                    attend(Q_tile, K_tile, V_tile, dim**-0.5, out, highest, total)
                for i, j in T.Parallel(block, dim):
                    Out[head, (index - 1) * block + i, j] = out[i, j] / total[i]

    return program


serial = ring_attention(HEADS, ROWS, DIM, RANKS)
pipelined = pipelined_ring_attention(HEADS, ROWS, DIM, RANKS)
examples = {"serial": serial, "pipelined": pipelined}


def inputs(ranks, rng):
    shape = ranks, 3, HEADS, ROWS, DIM
    parts = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    return [dict(zip("QKV", part, strict=True)) for part in parts]


def reference(inputs):
    K, V = (np.concatenate([r[name] for r in inputs], axis=1).astype(np.float32) for name in "KV")
    outputs = []
    for rank in inputs:
        Q = rank["Q"].astype(np.float32)
        weights = np.exp(np.einsum("hid,hjd->hij", Q, K) * DIM**-0.5)
        weights /= weights.sum(axis=2, keepdims=True)
        outputs.append({"Out": np.einsum("hij,hjd->hid", weights, V)})
    return outputs


def main():
    given = inputs(RANKS, np.random.default_rng(0))
    for name, program in examples.items():
        outputs = tw.simulate(program, world_size=RANKS, inputs=given, schedules=3)
        for output, expected in zip(outputs, reference(given), strict=True):
            np.testing.assert_allclose(output["Out"], expected["Out"], rtol=2e-2, atol=1e-2)
        print(f"{name}: each of {RANKS} ranks attends to {RANKS * ROWS} keys")


if __name__ == "__main__":
    main()
