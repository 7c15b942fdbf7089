"""GEMM + reduce-scatter kernels with one tile per block, which exchange products by themselves."""

from math import ceil

import tilelang.language as T

from ....builtins import language as W
from ....passes.sync.regions.symbols import product
from ...core.gemm_config import GemmConfig
from .tile_macros import Operands, TileBuffers, add_bias, add_tile, multiply, scale, store


def gemm_rs_store(config: GemmConfig):
    """Build the kernel: C (rows_per_rank, N) is this rank's rows of the sum over ranks of A (M, K)
    times B. Blocks store tiles of other ranks at their owners.

    A rank keeps the tiles of its own rows in fp32. It receives the tiles of other ranks rounded to
    ``out_dtype`` and adds them in fp32, starting with the left neighbor's, which arrive first.
    """
    ranks, rows_per_rank, tiles = config.ranks, config.rows_per_rank, config.tiles

    @T.prim_func
    def gemm_rs_store(
        A: T.Tensor((config.M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        C: T.Tensor((rows_per_rank, config.N), config.out_dtype),
    ):
        with T.Kernel(ranks * config.tiles_per_rank, threads=tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            # Products of other ranks for the own rows.
            partials = W.alloc_symmetric((ranks, rows_per_rank, config.N), config.out_dtype)
            buffers = TileBuffers.alloc(config, tiles.N)

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, config.tiles_per_rank, me, ranks)
            m, n = config.origin(tile, rows_per_rank)
            multiply(config, A, (owner * rows_per_rank + m,), B, n, buffers)
            scale(config, buffers.total, operands)
            if owner != me:
                store(buffers, (partials, (owner, me, m), n))
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks  # in the order of arrival
                    T.copy(partials[me, source, m, n], buffers.C)
                    add_tile(buffers.total, buffers.C)
                add_bias(config, buffers.total, operands, n)
                store(buffers, (C, (m,), n))

    return gemm_rs_store


def gemm_rs_one_shot(config: GemmConfig):
    """Build the kernel for few rows, which computes what ``gemm_rs_store`` does: each owner reads
    its rows from the tiles of all ranks.

    A tile may have rows of several owners. All products are rounded to ``out_dtype``, the own one
    too, which is added last.
    """
    M, N, ranks, rows_per_rank = config.M, config.N, config.ranks, config.rows_per_rank
    tiles, (rows, columns) = config.tiles, config.grid(M)
    height = ceil(tiles.M / ranks / 8) * 8  # most own rows that a block sums up

    @T.prim_func
    def gemm_rs_one_shot(
        A: T.Tensor((M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        C: T.Tensor((rows_per_rank, N), config.out_dtype),
    ):
        with T.Kernel(rows, columns, threads=tiles.threads) as (row, column):
            operands = Operands(A, B, bias, scale_a, scale_b)
            products = W.alloc_symmetric((M, N), config.out_dtype)  # own, for all owners
            buffers = TileBuffers.alloc(config, tiles.N)
            own_tile = T.alloc_shared((height, tiles.N), config.out_dtype)
            own_total = T.alloc_fragment((height, tiles.N), "float32")

            me = W.rank()
            m, n = row * tiles.M, column * tiles.N
            multiply(config, A, (m,), B, n, buffers)
            scale(config, buffers.total, operands)
            store(buffers, (products, (me, m), n))

            own_m = row * height
            T.clear(own_total)
            for step in T.serial(ranks):
                source = (me + 1 + step) % ranks
                T.copy(products[source, product(me, rows_per_rank) + own_m, n], own_tile)
                add_tile(own_total, own_tile)
            add_bias(config, own_total, operands, n)
            T.copy(own_total, own_tile)
            T.copy(own_tile, C[own_m, n])

    return gemm_rs_one_shot
