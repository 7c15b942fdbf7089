"""Attend to a split of the keys of a sequence."""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from .config import CONTIGUOUS, INTERLEAVED, STAGES
from .merge import LOWEST, store


@dataclass(frozen=True)
class Inputs:
    """Tensors that a program reads.

    Attributes:
        q: (batch * heads, dim).
        k_cache, v_cache: (tokens of all pages, kv_heads * dim).
        block_table: page of the cache for each page of a sequence, (batch, table).
        seq_lens: tokens of the sequences, (batch,).
    """

    q: Any
    k_cache: Any
    v_cache: Any
    block_table: Any
    seq_lens: Any


@dataclass(frozen=True)
class Buffers:
    """Memory of a block.

    Attributes:
        Q, K, V: tiles in shared memory.
        S: products of q and k, then their exponentials.
        P: the exponentials in the type of q.
        out: sum of exponentials times v.
        row_max, previous_max: maximum of each row so far, and before this tile of keys.
        rescale: factor of the sums so far, because the maximum has changed.
        tile_sum, row_sum: sums of exponentials of this tile of keys, and so far.
        lse: logarithms of base 2 of ``row_sum``.
    """

    Q: Any
    K: Any
    V: Any
    S: Any
    P: Any
    out: Any
    row_max: Any
    previous_max: Any
    rescale: Any
    tile_sum: Any
    row_sum: Any
    lse: Any


@dataclass(frozen=True)
class Split:
    """Keys of a block.

    Attributes:
        sequence, kv_head: sequence in the batch, and head of the cache.
        keys: keys of the sequence on this rank.
        begin, steps: first tile of keys, and number of tiles.
    """

    sequence: Any
    kv_head: Any
    keys: Any
    begin: Any
    steps: Any


@T.macro
def attend_to_split(config, inputs, results, me, item, split):
    """Attend with the heads of an item to a split of the keys on this rank."""
    buffers = alloc_buffers(config)
    keys = find_split(config, inputs, me, item, split)
    load_queries(config, inputs.q, item, buffers)
    clear(buffers)
    for step in T.Pipelined(keys.steps, num_stages=STAGES):
        load_keys(config, inputs, keys, step, buffers)
        attend(config, keys, step, buffers)
    divide(config, buffers)
    if config.merges:
        store_part(config, results.parts, (me, item, split), buffers)
    else:
        store(config, results, item, 0, config.rows, buffers.out, buffers.lse)


@T.macro
def alloc_buffers(config):
    """Allocate ``Buffers``."""
    M, N, dtype = config.M, config.N, config.dtype
    Q = T.alloc_shared((M, config.dim), dtype)
    K = T.alloc_shared((N, config.dim), dtype)
    V = T.alloc_shared((N, config.dim), dtype)
    S = T.alloc_fragment((M, N), "float32")
    P = T.alloc_fragment((M, N), dtype)
    out = T.alloc_fragment((M, config.dim), "float32")
    row_max = T.alloc_fragment((M,), "float32")
    previous_max = T.alloc_fragment((M,), "float32")
    rescale = T.alloc_fragment((M,), "float32")
    tile_sum = T.alloc_fragment((M,), "float32")
    row_sum = T.alloc_fragment((M,), "float32")
    lse = T.alloc_fragment((M,), "float32")
    return Buffers(Q, K, V, S, P, out, row_max, previous_max, rescale, tile_sum, row_sum, lse)


@T.macro
def find_split(config, inputs, me, item, split):
    """Return the ``Split`` of a block."""
    # Variables, because TVM would repeat their definitions in each index.
    keys, begin, steps = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    sequence = item // (config.heads // config.rows)
    kv_head = item % (config.heads // config.rows) // (config.group // config.rows)
    keys = keys_on_rank(config, inputs.seq_lens[sequence], me)
    steps = T.ceildiv(T.ceildiv(keys, config.N), config.splits)
    begin = split * steps
    steps = T.max(T.min(steps, T.ceildiv(keys, config.N) - begin), 0)
    return Split(sequence, kv_head, keys, begin, steps)


def keys_on_rank(config: Any, length: Any, me: Any) -> Any:
    """Return how many tokens of a sequence a rank holds, at most its capacity."""
    size, ranks = config.page_size, config.ranks
    keys = length
    if config.sharding == CONTIGUOUS:
        keys = length - me * config.capacity
    elif config.sharding == INTERLEAVED:
        pages, last = length // size, length % size
        keys = (pages + ranks - 1 - me) // ranks * size
        keys += T.if_then_else(pages % ranks == me, last, 0)
    return T.max(T.min(keys, config.capacity), 0)


@T.macro
def load_queries(config, q, item, buffers):
    """Load the queries of an item, and others into the rest of the tile."""
    T.copy(q[item * config.rows, 0], buffers.Q)


@T.macro
def clear(buffers):
    """Set all sums to 0 and all maxima to their lower bound."""
    T.clear(buffers.S)
    T.clear(buffers.out)
    T.clear(buffers.row_sum)
    T.fill(buffers.row_max, LOWEST)


@T.macro
def load_keys(config, inputs, keys, step, buffers):
    """Load a tile of keys and values."""
    load_tile(config, inputs, keys, step, inputs.k_cache, buffers.K)
    load_tile(config, inputs, keys, step, inputs.v_cache, buffers.V)


_ATOM = 64
"""Columns of a copy of a part of a tile: 128 bytes, the width of a swizzle."""


def load_tile(config: Any, inputs: Any, keys: Any, step: Any, cache: Any, tile: Any) -> None:
    """Emit the copies of a tile of keys, or of values, one for each run of tokens.

    A macro would bind rows to variables, and the copies would leave the producer warp.
    """
    column = keys.kv_head * config.dim
    for begin in range(0, config.N, config.run):
        token = (keys.begin + step) * config.N + begin
        # A sequence has no pages after its last token.
        page = inputs.block_table[keys.sequence, T.min(token, keys.keys - 1) // config.page_size]
        row = page * config.page_size + token % config.page_size
        if config.run == config.N:
            T.evaluate(T.copy(cache[row, column], tile))
            continue
        for j in range(0, config.dim, _ATOM):
            source = cache[row : row + config.run, column + j : column + j + _ATOM]
            T.evaluate(T.copy(source, tile[begin : begin + config.run, j : j + _ATOM]))


@T.macro
def attend(config, keys, step, buffers):
    """Attend to a tile of keys."""
    S, first = buffers.S, (keys.begin + step) * config.N
    policy = T.GemmWarpPolicy.FullRow
    T.gemm(buffers.Q, buffers.K, S, transpose_B=True, policy=policy)
    if first + config.N > keys.keys:
        for i, j in T.Parallel(config.M, config.N):
            S[i, j] = T.if_then_else(first + j < keys.keys, S[i, j], -T.infinity("float32"))
    add_exponentials(config, buffers)
    T.gemm(buffers.P, buffers.V, buffers.out, policy=policy)
    # A clear before the products would keep statements here that the producer has to execute first.
    T.clear(S)


@T.macro
def add_exponentials(config, buffers):
    """Replace S by exponentials, and update the maximum, the sums and ``out`` of each row."""
    S, to_log2 = buffers.S, config.to_log2
    T.copy(buffers.row_max, buffers.previous_max)
    T.reduce_max(S, buffers.row_max, dim=1, clear=False)
    for i in T.Parallel(config.M):
        buffers.rescale[i] = T.exp2((buffers.previous_max[i] - buffers.row_max[i]) * to_log2)
    for i, j in T.Parallel(config.M, config.N):
        S[i, j] = T.exp2(S[i, j] * to_log2 - buffers.row_max[i] * to_log2)
    T.reduce_sum(S, buffers.tile_sum, dim=1)
    for i in T.Parallel(config.M):
        buffers.row_sum[i] = buffers.row_sum[i] * buffers.rescale[i] + buffers.tile_sum[i]
    T.copy(S, buffers.P)
    for i, j in T.Parallel(config.M, config.dim):
        buffers.out[i, j] *= buffers.rescale[i]


@T.macro
def divide(config, buffers):
    """Divide ``out`` by the sums of exponentials, and compute the logarithms of these sums: zeros,
    and minus infinity, without keys."""
    for i, j in T.Parallel(config.M, config.dim):
        buffers.out[i, j] = T.if_then_else(
            buffers.row_sum[i] > 0, buffers.out[i, j] / buffers.row_sum[i], 0
        )
    for i in T.Parallel(config.M):
        buffers.lse[i] = buffers.row_max[i] * config.to_log2 + T.log2(buffers.row_sum[i])


@T.macro
def store_part(config, parts, place, buffers):
    """Store results and logarithms at a place of the parts of this rank."""
    for i, j in T.Parallel(config.M, config.dim):
        if i < config.rows:
            parts[(*place, i, j)] = buffers.out[i, j]
    for i, j in T.Parallel(config.M, config.columns - config.dim):
        if i < config.rows:
            parts[(*place, i, config.dim + j)] = buffers.lse[i]
