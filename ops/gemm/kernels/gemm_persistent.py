"""Persistent GEMM kernels beside copy engines, which transfer the products between ranks.

Both kernels compute tiles in the order of ``W.swizzle_ranks``: those of other ranks first, own
tiles last. Blocks are persistent, see ``PersistentSchedule``.
"""

from typing import Any, NamedTuple

import tilelang.language as T

from ....builtins import language as W
from ....passes import split_options
from ...core.gemm_config import GemmConfig
from ...core.tiles import PersistentSchedule
from .partial_sums import PeerProducts, complete_sum, compute_tile, identity_of
from .pull_tail import PullTail, pull
from .tile_macros import Operands, TileBuffers, store


def gemm_rs_persistent(config: GemmConfig):
    """Build the kernel: C (rows_per_rank, N) is this rank's rows of the sum over ranks of A (M, K)
    times B.

    The kernel computes what ``gemm_rs_store`` does. It writes its products for other ranks to
    ``products``. Copies write the products of other ranks to ``partials``. If
    ``config.stores_last_peer``, the kernel stores the products for the peer that it serves last in
    that peer's ``last_peer_buf``.
    """
    ranks, tiles = config.ranks, config.tiles
    schedule = PersistentSchedule.for_tiles(ranks * config.tiles_per_rank)

    @T.prim_func
    def gemm_rs_persistent(
        A: T.Tensor((config.M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        products: config.partials,
        partials: config.partials,
        last_peer_buf: config.last_peer_buf,
        identity: identity_of(config),
        C: T.Tensor((config.rows_per_rank, config.N), config.out_dtype),
    ):
        with T.Kernel(schedule.blocks, threads=tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            buffers = TileBuffers.alloc(config, tiles.width)

            me = W.rank()
            received = PeerProducts(me, partials, last_peer_buf, identity)
            for wave in T.serial(schedule.waves):
                index = wave * schedule.blocks + block
                if index < schedule.tiles:
                    owner, tile = W.swizzle_ranks(index, config.tiles_per_rank, me, ranks)
                    m, n = config.origin(tile, config.rows_per_rank)
                    compute_tile(config, operands, received, owner, m, n, buffers)
                    if config.stores_last_peer and owner == (me + ranks - 1) % ranks:
                        store(buffers, (last_peer_buf, (owner, m), n))
                    elif owner != me:
                        store(buffers, (products, (me, owner, m), n))
                    else:
                        complete_sum(config, operands, received, m, n, buffers)
                        store(buffers, (C, (m,), n))

    granules = _granule_of_last_peer(config)
    return split_options(gemm_rs_persistent, {"tileweave.granule": granules})[0]


def gemm_ar_persistent(config: GemmConfig):
    """Build the kernel: C (M, N) is the sum over ranks of A (M, K) times B.

    Each rank sums whole tiles as ``gemm_rs_persistent`` does, and writes the sums to its rows of C.
    It also writes them to ``sums``, from which copies transfer them to the other ranks. The sums of
    the last chunk are written to ``pulled_sums`` instead, from which the blocks of other ranks pull
    them.
    """
    owned, ranks, tiles = config.whole_tiles, config.ranks, config.tiles
    rows_per_rank = owned.rows_per_rank
    chunk, tail = tiles.tiles_per_chunk(config.N), PullTail.last_chunk(owned)
    schedule = PersistentSchedule.for_tiles(ranks * owned.tiles_per_rank)

    @T.prim_func
    def gemm_ar_persistent(
        A: T.Tensor((config.M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        products: owned.partials,
        partials: owned.partials,
        last_peer_buf: owned.last_peer_buf,
        sums: copied_sums_of(config),
        identity: identity_of(config),
        C: T.Tensor((config.M, config.N), config.out_dtype),
    ):
        with T.Kernel(schedule.blocks, threads=tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            buffers = TileBuffers.alloc(config, tiles.width)
            pulled_sums = None
            if ranks > 1:
                pulled_sums = W.alloc_symmetric((tail.rows, tail.columns), config.out_dtype)

            me = W.rank()
            received = PeerProducts(me, partials, last_peer_buf, identity)
            for wave in T.serial(schedule.waves):
                index = wave * schedule.blocks + block
                if index < schedule.tiles:
                    owner, tile = W.swizzle_ranks(index, owned.tiles_per_rank, me, ranks, chunk)
                    m, n = config.origin(tile, rows_per_rank)
                    compute_tile(owned, operands, received, owner, m, n, buffers)
                    if owned.stores_last_peer and owner == (me + ranks - 1) % ranks:
                        store(buffers, (last_peer_buf, (owner, m), n))
                    elif owner != me:
                        store(buffers, (products, (me, owner, m), n))
                    else:
                        complete_sum(owned, operands, received, m, n, buffers)
                        store_sum(C, Sums(sums, pulled_sums), me, tail, tile, m, n, buffers)
            if ranks > 1:
                pull(pulled_sums, C, tail, block, schedule.blocks, ranks)

    granules = _granule_of_last_peer(owned)
    if ranks > 1:
        granules["pulled_sums"] = tail.granule
    return split_options(gemm_ar_persistent, {"tileweave.granule": granules})[0]


class Sums(NamedTuple):
    """Memory from which own sums reach the other ranks.

    Attributes:
        copied: (rows_per_rank, N), from which copies transfer all chunks but the last one.
        pulled: (rows, columns) of the last chunk, from which other ranks pull; None for one rank.
    """

    copied: Any
    pulled: Any


@T.macro
def store_sum(C, sums, me, tail, tile, m, n, buffers):
    """Store a complete own tile in C and, if there are other ranks, where they receive it from."""
    result = C, (me * tail.rows_per_rank + m,), n
    if sums.pulled is None:
        store(buffers, result)
    elif tile >= tail.first:
        store(buffers, result, (sums.pulled, (me, m - tail.m), n - tail.n))
    elif tail.first > 0:
        store(buffers, result, (sums.copied, (me, m), n))


def copied_sums_of(config: GemmConfig):
    """Return the declaration of the own sums that copies transfer; None if there are none."""
    owned = config.whole_tiles
    if config.ranks == 1 or PullTail.last_chunk(owned).first == 0:
        return None
    return W.Symmetric((owned.rows_per_rank, config.N), config.out_dtype)


def _granule_of_last_peer(config: GemmConfig) -> dict[str, tuple[int, int]]:
    """Return the granule of ``last_peer_buf`` if each step that adds reads only one tile of it."""
    if not config.stores_last_peer or config.tiles.N % config.tiles.K:
        return {}
    rows, columns = config.tiles.M, config.tiles.N
    return {"last_peer_buf": (min(rows, config.rows_per_rank), min(columns, config.N))}
