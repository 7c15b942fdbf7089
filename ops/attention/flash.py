"""Tile program of flash attention of a rank's queries to the keys of all ranks.

Keys arrive in chunks: each owner has one or two (see ``sequence``); for full attention all keys of
an owner are one chunk. A tile of queries sees some chunks completely. If attention is causal, it
sees a part of its last chunk, the diagonal one. The tile starts with the diagonal chunk, which is
local on its own rank, and then visits the owners in the order in which their keys arrive.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import tilelang.language as T
import torch

from ...builtins import language as W
from .problem import AttentionProblem

LOG2_E = 1.4426950408889634
FAST_MATH = {"tl.enable_fast_math": True}
"""Compute powers of two with one instruction: 10 to 13 % faster (benchmarks/LOG.md)."""

_LOWEST = -1e30
"""Lower bound of all products of q and k. It is finite, so that the maximum of a row that has not
seen a key yet differs from itself by 0."""


@dataclass(frozen=True)
class FlashTiles:
    """Tile sizes of a block.

    Attributes:
        M, N: queries and keys of a tile.
        stages: tiles of keys and values in flight.
        threads: threads of a block without the producer that TileLang adds: 128 for each 64
            queries.
    """

    M: int
    N: int
    stages: int
    threads: int

    def __str__(self) -> str:
        return f"tiles of {self.M} x {self.N}, {self.stages} stages, {self.threads} threads"


class PackedTile(NamedTuple):
    """Queries of one of several packed sequences, and the keys that they see.

    Attributes:
        row, valid: index of the first query among the rank's queries, and number of queries, at
            most those of one tile.
        begin: number of keys that the first query sees.
        k_row: index of the sequence's first key among the keys of each owner.
        chunk: keys of a chunk of the sequence.
    """

    row: Any
    valid: Any
    begin: Any
    k_row: Any
    chunk: Any


def packed_tiles(
    problem: AttentionProblem, tiles: FlashTiles, rank: int, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> torch.Tensor:
    """Return a rank's tiles, ``most_tiles`` rows of ``PackedTile``.

    Tiles that see the most keys come first. Unused rows have no queries and come last. The host
    does not wait.
    """
    parts, sharding = problem.sharding.parts, problem.sharding
    q_lengths, k_lengths = cu_q.diff(), cu_k.diff()
    rows = (q_lengths // sharding.chunks).repeat_interleave(parts)
    counts = (rows + tiles.M - 1) // tiles.M
    ends = counts.cumsum(0)
    number = torch.arange(most_tiles(problem, tiles), device=cu_q.device)
    piece = torch.searchsorted(ends, number, right=True)
    used = piece < len(ends)
    piece = piece.clamp(max=len(ends) - 1)
    sequence, part = piece // parts, piece % parts
    first = (number - ends[piece] + counts[piece]) * tiles.M
    more = k_lengths[sequence] - q_lengths[sequence]
    tile = PackedTile(
        row=cu_q[sequence] // problem.ranks + part * rows[piece] + first,
        valid=(rows[piece] - first).clamp(0, tiles.M) * used,
        begin=sharding.chunk_of(part, rank) * rows[piece] + first + more + 1,
        k_row=cu_k[sequence] // problem.ranks,
        chunk=k_lengths[sequence] // (problem.ranks * (parts if problem.causal else 1)),
    )
    work = (tile.begin if problem.causal else k_lengths[sequence]) * used
    return torch.stack(tile, 1)[work.argsort(descending=True)].int()


def most_tiles(problem: AttentionProblem, tiles: FlashTiles) -> int:
    """Return the number of tiles of queries of a rank for each head; if packed, an upper bound."""
    parts = problem.sharding.parts
    if problem.packed:
        return problem.q_rows // tiles.M + problem.batch * parts
    return parts * ceil(problem.q_rows // parts / tiles.M)


def key_chunk(problem: AttentionProblem) -> int:
    """Return the rows of a chunk of keys; the average if sequences are packed."""
    sequences = problem.batch if problem.packed else 1
    return problem.k_rows // sequences // (problem.sharding.parts if problem.causal else 1)


_KEYS = ((128, 1.0), (112, 0.96), (96, 0.81))
"""Keys of a tile, and its time relative to the first one on an H200 (benchmarks/LOG.md)."""


def tiles_for(problem: AttentionProblem) -> FlashTiles:
    """Return the tiles with which a chunk of keys needs the least time."""
    sequences = problem.batch if problem.packed else 1
    queries = problem.q_rows // sequences // problem.sharding.parts
    chunk = key_chunk(problem)
    if queries <= 64:
        return FlashTiles(64, 64, 2, 128)
    if queries <= 128:
        return FlashTiles(128, 64 if problem.dim > 128 else 128, 2, 256)
    if problem.dim > 128:
        return FlashTiles(192, 80, 2, 384)
    keys = min(_KEYS, key=lambda option: ceil(chunk / option[0]) * option[1])[0]
    return FlashTiles(192, keys, 2, 384)


def queries_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    """Return (batch, parts, rows) of Q: packed sequences are a batch of 1 and one part."""
    parts = 1 if problem.packed else problem.sharding.parts
    return 1 if problem.packed else problem.batch, parts, problem.q_rows // parts


def keys_shape(problem: AttentionProblem) -> tuple[int, int]:
    """Return (batch, rows) of K."""
    return 1 if problem.packed else problem.batch, problem.k_rows


def flash_attention(problem: AttentionProblem, tiles: FlashTiles):
    """Build the kernel: Out and the logarithms of the sums of exponentials, LSE, of
    Q (batch, parts, rows, heads, dim) over gathered K and V (owner, batch, rows, kv_heads * dim).

    If sequences are packed, blocks compute the tiles that ``packed_tiles`` lists.
    """
    heads, ranks, dtype, packed = problem.heads, problem.ranks, problem.tile_dtype, problem.packed
    dim, v_dim, kv_heads, group = problem.dim, problem.v_dim, problem.kv_heads, problem.group
    sharding, causal = problem.sharding, problem.causal
    parts = sharding.parts
    zigzag, prefixed = parts == 2, packed or problem.k_total > problem.q_total
    q_shape, k_shape = queries_shape(problem), keys_shape(problem)
    batch, _, rows = q_shape
    M, N = tiles.M, tiles.N
    blocks = most_tiles(problem, tiles)
    to_log2 = problem.scale * LOG2_E
    registers = {128: 240, 256: 240, 384: 160}[tiles.threads]

    @T.prim_func
    def flash_attention(
        Q: T.Tensor((*q_shape, heads, dim), dtype),
        work: T.Tensor((blocks, len(PackedTile._fields)), "int32") if packed else None,
        K: W.Symmetric((ranks, *k_shape, kv_heads * dim), dtype),
        V: W.Symmetric((ranks, *k_shape, kv_heads * v_dim), dtype),
        Out: T.Tensor((*q_shape, heads, v_dim), dtype),
        LSE: T.Tensor((batch, heads, *q_shape[1:]), "float32"),
    ):
        with T.Kernel(batch * heads, blocks, threads=tiles.threads) as (bx, by):
            Q_tile = T.alloc_shared((M, dim), dtype)
            K_tile = T.alloc_shared((N, dim), dtype)
            V_tile = T.alloc_shared((N, v_dim), dtype)
            out_tile = T.alloc_shared((M, v_dim), dtype)
            S = T.alloc_fragment((M, N), "float32")
            P = T.alloc_fragment((M, N), dtype)
            out = T.alloc_fragment((M, v_dim), "float32")
            highest = T.alloc_fragment((M,), "float32")
            before = T.alloc_fragment((M,), "float32")
            shrink = T.alloc_fragment((M,), "float32")
            added = T.alloc_fragment((M,), "float32")
            total = T.alloc_fragment((M,), "float32")
            lse = T.alloc_fragment((M,), "float32")
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(registers)

            # Variables, because TVM would simplify indices with their definitions for minutes.
            me, b, head = W.rank(), bx // heads, bx % heads
            if packed:
                row, valid = T.alloc_var("int32"), T.alloc_var("int32")
                begin, k_row = T.alloc_var("int32"), T.alloc_var("int32")
                chunk, steps = T.alloc_var("int32"), T.alloc_var("int32")
                q_part = 0
                row = work[by, 0]
                valid = work[by, 1]
                begin = work[by, 2]
                k_row = work[by, 3]
                chunk = work[by, 4]
                steps = T.max(T.ceildiv(chunk, N), 1)
            else:
                # Tiles that see the most keys come first.
                chunk, k_row = key_chunk(problem), 0
                steps, row_tiles = ceil(chunk / N), ceil(rows / M)
                q_part, row = parts - 1 - by % parts, (row_tiles - 1 - by // parts) * M
                valid = T.min(M, rows - row)
                begin = sharding.chunk_of(q_part, me) * rows + row
                begin += problem.k_total - problem.q_total + 1  # keys that the first row sees
            end = begin - 1 + valid

            if causal:
                whole, some = T.alloc_var("int32"), T.alloc_var("int32")
                nearest, mirrored = T.alloc_var("int32"), T.alloc_var("int32")
                whole = (end - 1) // chunk  # chunks seen completely
                some = T.ceildiv(end - whole * chunk, N)
                nearest = T.if_then_else(whole < ranks, whole, 2 * ranks - 1 - whole)  # an owner
                mirrored = T.if_then_else(whole < ranks, 0, 1)
            else:
                whole, some, nearest, mirrored = ranks - 1, steps, me, 0
            rounds = some + whole * steps
            if packed:
                rounds = T.if_then_else(valid > 0, rounds, 0)

            T.copy(Q[b, q_part, row : row + M, head, 0:dim], Q_tile)
            T.clear(S)
            T.clear(out)
            T.clear(total)
            T.fill(highest, _LOWEST)
            for step in T.Pipelined(rounds, num_stages=tiles.stages):
                visit = (step + steps - some) // steps - mirrored
                k = T.if_then_else(step < some, step, (step - some) % steps) * N
                owner, part = _visited(visit, nearest, ranks, causal, zigzag)
                T.copy(K[me, owner, b, k_row + part * chunk + k, head // group * dim], K_tile)
                T.copy(V[me, owner, b, k_row + part * chunk + k, head // group * v_dim], V_tile)
                T.gemm(Q_tile, K_tile, S, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                if causal and prefixed:  # a tile may start and end in different chunks
                    first = sharding.chunk_of(part, owner) * chunk + k
                    if first + N > begin or k + N > chunk:
                        for i, j in T.Parallel(M, N):
                            seen = (first + j < begin + i) & (k + j < chunk)
                            S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                elif causal:
                    if step < some and step * N + N > begin - whole * chunk:
                        for i, j in T.Parallel(M, N):
                            seen = step * N + j < begin - whole * chunk + i
                            S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))
                if not (causal and prefixed) and (packed or chunk % N):
                    if k + N > chunk:
                        for i, j in T.Parallel(M, N):
                            S[i, j] = T.if_then_else(k + j < chunk, S[i, j], -T.infinity("float32"))
                T.copy(highest, before)
                T.reduce_max(S, highest, dim=1, clear=False)
                for i in T.Parallel(M):
                    shrink[i] = T.exp2((before[i] - highest[i]) * to_log2)
                for i, j in T.Parallel(M, N):
                    S[i, j] = T.exp2(S[i, j] * to_log2 - highest[i] * to_log2)
                T.reduce_sum(S, added, dim=1)
                for i in T.Parallel(M):
                    total[i] = total[i] * shrink[i] + added[i]
                T.copy(S, P)
                for i, j in T.Parallel(M, v_dim):
                    out[i, j] *= shrink[i]
                T.gemm(P, V_tile, out, policy=T.GemmWarpPolicy.FullRow)
                # clear_accum=True needs too many registers. A clear before the products would keep
                # statements here that the producer has to execute first.
                T.clear(S)

            for i, j in T.Parallel(M, v_dim):
                out[i, j] /= total[i]
            for i in T.Parallel(M):
                lse[i] = (highest[i] * to_log2 + T.log2(total[i])) / LOG2_E
            if packed:  # the next rows belong to another sequence
                for i, j in T.Parallel(M, v_dim):
                    if i < valid:
                        Out[b, q_part, row + i, head, j] = out[i, j]
                for i in T.Parallel(M):
                    if i < valid:
                        LSE[b, head, q_part, row + i] = lse[i]
            else:
                T.copy(out, out_tile)
                T.copy(out_tile, Out[b, q_part, row : row + M, head, 0:v_dim])
                T.copy(lse, LSE[b, head, q_part, row : row + M])

    return flash_attention


def _visited(visit, nearest, ranks, causal, zigzag):
    """Return the owner of the keys of a visit, and the part of its keys.

    Visits start with ``nearest`` and continue with its left neighbor and so on. For causal zigzag
    attention, visit -1 is the second part of ``nearest``. The visits after rank 0 alternate between
    the first and the second part of the owners from rank W - 1 on.
    """
    if not causal:
        return (nearest + ranks - visit) % ranks, 0
    if not zigzag:
        return nearest - visit, 0
    beyond = visit - nearest - 1
    owner = T.if_then_else(beyond < 0, nearest - T.max(visit, 0), ranks - 1 - beyond // 2)
    part = T.if_then_else(beyond < 0, T.if_then_else(visit < 0, 1, 0), beyond % 2)
    return owner, part
