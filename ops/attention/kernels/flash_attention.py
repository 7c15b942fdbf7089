"""Flash attention of a rank's queries to the keys of all ranks.

Keys arrive in chunks: each owner has one or two (see ``sequence``); for full attention all keys of
an owner are one chunk. A tile of queries sees some chunks completely. If attention is causal, it
sees a part of its last chunk, the diagonal one. The tile starts with the diagonal chunk, which is
local on its own rank, and then visits the owners in the order in which their keys arrive.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ....builtins import language as W
from ..flash import FlashTiles, PackedTile, key_chunk, keys_shape, max_tiles, queries_shape
from ..problem import AttentionProblem

LOG2_E = 1.4426950408889634
FAST_MATH = {"tl.enable_fast_math": True}
"""Compute powers of two with one instruction: 10 to 13 % faster (benchmarks/LOG.md)."""

_LOWEST = -1e30
"""Lower bound of all products of q and k. It is finite, so that the maximum of a row that has not
seen a key yet differs from itself by 0."""


@dataclass(frozen=True)
class FlashConfig:
    """Problem and tiles for which a kernel is instantiated."""

    problem: AttentionProblem
    tiles: FlashTiles

    @property
    def masks_prefix(self) -> bool:
        """True for causal attention in which a tile of queries may start and end in different
        chunks of keys."""
        problem = self.problem
        return problem.causal and (problem.packed or problem.k_total > problem.q_total)

    @property
    def masks_diagonal(self) -> bool:
        """True for causal attention in which each tile of queries sees a part of one chunk."""
        return self.problem.causal and not self.masks_prefix

    @property
    def masks_tail(self) -> bool:
        """True if the last tile of a chunk may have keys of the next one, unless the other masks
        exclude them."""
        cut = self.problem.packed or key_chunk(self.problem) % self.tiles.N != 0
        return cut and not self.masks_prefix

    @property
    def to_log2(self) -> float:
        """Factor from products of q and k to exponents of 2."""
        return self.problem.scale * LOG2_E

    @property
    def registers(self) -> int:
        """Registers of a consumer thread."""
        return {128: 240, 256: 240, 384: 160}[self.tiles.threads]


@dataclass(frozen=True)
class FlashBuffers:
    """Memory of a block.

    Attributes:
        Q, K, V, result: tiles in shared memory.
        S: products of q and k, then their exponentials, in fp32.
        P: the exponentials in the type of v.
        out: sum of exponentials times v.
        row_max, previous_max: maximum of each row so far, and before this tile of keys.
        rescale: factor of the sums so far, because the maximum has changed.
        tile_sum, row_sum: sums of exponentials of this tile of keys, and so far.
        lse: logarithms of ``row_sum``.
    """

    Q: Any
    K: Any
    V: Any
    result: Any
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
class QueryTile:
    """Queries of a block and the keys that they see.

    Attributes:
        part, row: index of the rank's chunk of queries, and of the first query in it.
        valid: number of queries.
        begin, end: numbers of keys that the first and the last query see.
        k_row: index of the first key of the sequence among the keys of each owner.
        chunk: keys of a chunk.
        steps: tiles of keys of a chunk.
    """

    part: Any
    row: Any
    valid: Any
    begin: Any
    end: Any
    k_row: Any
    chunk: Any
    steps: Any

    def of(self, x: Any, b: Any, head: Any, rows: int) -> Any:
        """Return the region of these queries in x (batch, parts, rows, heads, dim)."""
        return x[b, self.part, self.row : self.row + rows, head, 0 : x.shape[-1]]

    def key(self, part: Any, k: Any, column: Any) -> tuple[Any, Any]:
        """Return the row of key ``k`` of an owner's chunk ``part`` among its keys, and ``column``.

        A macro would bind the row to a variable, and the load would leave the producer warp.
        """
        return self.k_row + part * self.chunk + k, column


@dataclass(frozen=True)
class Visits:
    """Chunks of keys that a tile of queries visits.

    Attributes:
        whole_chunks: number of chunks that it sees completely.
        diagonal_steps: tiles of keys of the chunk that it visits first.
        nearest_owner: owner of that chunk.
        mirrored: 1 if that chunk is the second one of its owner, else 0.
        num_steps: tiles of keys of all chunks.
    """

    whole_chunks: Any
    diagonal_steps: Any
    nearest_owner: Any
    mirrored: Any
    num_steps: Any


def flash_attention(problem: AttentionProblem, tiles: FlashTiles):
    """Build the kernel: Out and the logarithms of the sums of exponentials, LSE, of
    Q (batch, parts, rows, heads, dim) over gathered K and V (owner, batch, rows, kv_heads * dim).

    If sequences are packed, blocks compute the tiles that ``packed_tiles`` lists.
    """
    config, ranks, dtype = FlashConfig(problem, tiles), problem.ranks, problem.tile_dtype
    heads, group, dim, v_dim = problem.heads, problem.group, problem.dim, problem.v_dim
    q_shape, k_shape = queries_shape(problem), keys_shape(problem)
    batch, *q_rows = q_shape
    blocks = max_tiles(problem, tiles)

    @T.prim_func
    def flash_attention(
        Q: T.Tensor((*q_shape, heads, dim), dtype),
        work: T.Tensor((blocks, len(PackedTile._fields)), "int32") if problem.packed else None,
        K: W.Symmetric((ranks, *k_shape, problem.kv_heads * dim), dtype),
        V: W.Symmetric((ranks, *k_shape, problem.kv_heads * v_dim), dtype),
        Out: T.Tensor((*q_shape, heads, v_dim), dtype),
        LSE: T.Tensor((batch, heads, *q_rows), "float32"),
    ):
        with T.Kernel(batch * heads, blocks, threads=tiles.threads) as (bx, by):
            buffers = alloc_buffers(config)
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(config.registers)

            me, b, head = W.rank(), bx // heads, bx % heads
            queries = locate_queries(config, work, by, me)
            visits = plan_visits(config, queries, me)
            T.copy(queries.of(Q, b, head, tiles.M), buffers.Q)
            clear(buffers)
            for step in T.Pipelined(visits.num_steps, num_stages=tiles.stages):
                owner, part, k = locate_keys(config, queries, visits, step)
                T.copy(K[(me, owner, b, *queries.key(part, k, head // group * dim))], buffers.K)
                T.copy(V[(me, owner, b, *queries.key(part, k, head // group * v_dim))], buffers.V)
                attend(config, queries, visits, step, owner, part, k, buffers)
            divide(config, buffers)
            store_result(config, queries, (b, head), Out, LSE, buffers)

    return flash_attention


@T.macro
def alloc_buffers(config):
    """Allocate ``FlashBuffers``."""
    M, N, dtype = config.tiles.M, config.tiles.N, config.problem.tile_dtype
    dim, v_dim = config.problem.dim, config.problem.v_dim
    Q_tile = T.alloc_shared((M, dim), dtype)
    K_tile = T.alloc_shared((N, dim), dtype)
    V_tile = T.alloc_shared((N, v_dim), dtype)
    out_tile = T.alloc_shared((M, v_dim), dtype)
    S = T.alloc_fragment((M, N), "float32")
    P = T.alloc_fragment((M, N), dtype)
    out = T.alloc_fragment((M, v_dim), "float32")
    row_max = T.alloc_fragment((M,), "float32")
    previous_max = T.alloc_fragment((M,), "float32")
    rescale = T.alloc_fragment((M,), "float32")
    tile_sum = T.alloc_fragment((M,), "float32")
    row_sum = T.alloc_fragment((M,), "float32")
    lse = T.alloc_fragment((M,), "float32")
    return FlashBuffers(
        Q_tile, K_tile, V_tile, out_tile, S, P, out, row_max, previous_max, rescale, tile_sum,
        row_sum, lse,
    )  # fmt: skip


@T.macro
def clear(buffers):
    """Set all sums to 0 and all maxima to their lower bound."""
    T.clear(buffers.S)
    T.clear(buffers.out)
    T.clear(buffers.row_sum)
    T.fill(buffers.row_max, _LOWEST)


@T.macro
def locate_queries(config, work, by, me):
    """Return the ``QueryTile`` of block ``by``. Tiles that see the most keys come first."""
    problem, (M, N) = config.problem, (config.tiles.M, config.tiles.N)
    _, parts, rows = queries_shape(problem)
    if problem.packed:
        # Variables, because TVM would simplify indices with their definitions for minutes.
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
        chunk, k_row = key_chunk(problem), 0
        steps, row_tiles = ceil(chunk / N), ceil(rows / M)
        q_part, row = parts - 1 - by % parts, (row_tiles - 1 - by // parts) * M
        valid = T.min(M, rows - row)
        begin = problem.sharding.chunk_of(q_part, me) * rows + row
        begin += problem.k_total - problem.q_total + 1
    end = begin - 1 + valid
    return QueryTile(q_part, row, valid, begin, end, k_row, chunk, steps)


@T.macro
def plan_visits(config, queries, me):
    """Return the ``Visits`` of a tile of queries."""
    ranks = config.problem.ranks
    if config.problem.causal:
        whole_chunks, diagonal_steps = T.alloc_var("int32"), T.alloc_var("int32")
        nearest_owner, mirrored = T.alloc_var("int32"), T.alloc_var("int32")
        whole_chunks = (queries.end - 1) // queries.chunk
        diagonal_steps = T.ceildiv(queries.end - whole_chunks * queries.chunk, config.tiles.N)
        nearest_owner = T.if_then_else(
            whole_chunks < ranks, whole_chunks, 2 * ranks - 1 - whole_chunks
        )
        mirrored = T.if_then_else(whole_chunks < ranks, 0, 1)
    else:
        whole_chunks, diagonal_steps, nearest_owner, mirrored = ranks - 1, queries.steps, me, 0
    num_steps = diagonal_steps + whole_chunks * queries.steps
    if config.problem.packed:
        num_steps = T.if_then_else(queries.valid > 0, num_steps, 0)
    return Visits(whole_chunks, diagonal_steps, nearest_owner, mirrored, num_steps)


@T.macro
def locate_keys(config, queries, visits, step):
    """Return owner, chunk of the owner, and first key in the chunk, of a tile of keys."""
    # A variable for the counts would be one more statement before the loads.
    visit = (step + queries.steps - visits.diagonal_steps) // queries.steps - visits.mirrored
    k = (
        T.if_then_else(
            step < visits.diagonal_steps, step, (step - visits.diagonal_steps) % queries.steps
        )
        * config.tiles.N
    )
    owner, part = _visited(config, visit, visits.nearest_owner)
    return owner, part, k


@T.macro
def attend(config, queries, visits, step, owner, part, k, buffers):
    """Attend to a tile of keys."""
    S, rows = buffers.S, T.GemmWarpPolicy.FullRow
    T.gemm(buffers.Q, buffers.K, S, transpose_B=True, policy=rows)
    if config.masks_prefix:
        mask_prefix(config, queries, owner, part, k, S)
    if config.masks_diagonal:
        mask_diagonal(config, queries, visits, step, S)
    if config.masks_tail:
        mask_tail(config, queries, k, S)
    add_exponentials(config, buffers)
    T.gemm(buffers.P, buffers.V, buffers.out, policy=rows)
    # clear_accum=True needs too many registers. A clear before the products would keep statements
    # here that the producer has to execute first.
    T.clear(S)


@T.macro
def mask_prefix(config, queries, owner, part, k, S):
    """Exclude the keys after the position of each query, and those of the next chunk."""
    M, N = config.tiles.M, config.tiles.N
    first = config.problem.sharding.chunk_of(part, owner) * queries.chunk + k
    if first + N > queries.begin or k + N > queries.chunk:
        for i, j in T.Parallel(M, N):
            seen = (first + j < queries.begin + i) & (k + j < queries.chunk)
            S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))


@T.macro
def mask_diagonal(config, queries, visits, step, S):
    """Exclude the keys after the position of each query in the diagonal chunk."""
    M, N = config.tiles.M, config.tiles.N
    if (
        step < visits.diagonal_steps
        and step * N + N > queries.begin - visits.whole_chunks * queries.chunk
    ):
        for i, j in T.Parallel(M, N):
            seen = step * N + j < queries.begin - visits.whole_chunks * queries.chunk + i
            S[i, j] = T.if_then_else(seen, S[i, j], -T.infinity("float32"))


@T.macro
def mask_tail(config, queries, k, S):
    """Exclude the keys of the next chunk."""
    M, N = config.tiles.M, config.tiles.N
    if k + N > queries.chunk:
        for i, j in T.Parallel(M, N):
            S[i, j] = T.if_then_else(k + j < queries.chunk, S[i, j], -T.infinity("float32"))


@T.macro
def add_exponentials(config, buffers):
    """Replace S by exponentials, and update the maximum, the sums and ``out`` of each row."""
    S, to_log2 = buffers.S, config.to_log2
    M, N = config.tiles.M, config.tiles.N
    T.copy(buffers.row_max, buffers.previous_max)
    T.reduce_max(S, buffers.row_max, dim=1, clear=False)
    for i in T.Parallel(M):
        buffers.rescale[i] = T.exp2((buffers.previous_max[i] - buffers.row_max[i]) * to_log2)
    for i, j in T.Parallel(M, N):
        S[i, j] = T.exp2(S[i, j] * to_log2 - buffers.row_max[i] * to_log2)
    T.reduce_sum(S, buffers.tile_sum, dim=1)
    for i in T.Parallel(M):
        buffers.row_sum[i] = buffers.row_sum[i] * buffers.rescale[i] + buffers.tile_sum[i]
    T.copy(S, buffers.P)
    for i, j in T.Parallel(M, config.problem.v_dim):
        buffers.out[i, j] *= buffers.rescale[i]


@T.macro
def divide(config, buffers):
    """Divide ``out`` by the sums of exponentials, and compute the logarithms of these sums."""
    M, out, row_sum = config.tiles.M, buffers.out, buffers.row_sum
    for i, j in T.Parallel(M, config.problem.v_dim):
        out[i, j] /= row_sum[i]
    for i in T.Parallel(M):
        buffers.lse[i] = (buffers.row_max[i] * config.to_log2 + T.log2(row_sum[i])) / LOG2_E


@T.macro
def store_result(config, queries, place, Out, LSE, buffers):
    """Store ``out`` and ``lse``.

    Args:
        place: index in the batch, and head.
    """
    M, v_dim, (b, head) = config.tiles.M, config.problem.v_dim, place
    if config.problem.packed:  # the next rows belong to another sequence
        for i, j in T.Parallel(M, v_dim):
            if i < queries.valid:
                Out[b, queries.part, queries.row + i, head, j] = buffers.out[i, j]
        for i in T.Parallel(M):
            if i < queries.valid:
                LSE[b, head, queries.part, queries.row + i] = buffers.lse[i]
    else:
        row = queries.row
        T.copy(buffers.out, buffers.result)
        T.copy(buffers.result, queries.of(Out, b, head, M))
        T.copy(buffers.lse, LSE[b, head, queries.part, row : row + M])


def _visited(config: FlashConfig, visit: Any, nearest: Any) -> tuple[Any, Any]:
    """Return the owner of the keys of a visit, and the part of its keys.

    Visits start with ``nearest`` and continue with its left neighbor and so on. For causal zigzag
    attention, visit -1 is the second part of ``nearest``. The visits after rank 0 alternate between
    the first and the second part of the owners from rank W - 1 on.
    """
    ranks = config.problem.ranks
    if not config.problem.causal:
        return (nearest + ranks - visit) % ranks, 0
    if config.problem.sharding.parts == 1:
        return nearest - visit, 0
    beyond = visit - nearest - 1
    owner = T.if_then_else(beyond < 0, nearest - T.max(visit, 0), ranks - 1 - beyond // 2)
    part = T.if_then_else(beyond < 0, T.if_then_else(visit < 0, 1, 0), beyond % 2)
    return owner, part
