"""GEMM + all-reduce kernels that exchange products by themselves."""

from math import ceil

import tilelang.language as T

from ....builtins import language as W
from ...core.gemm_config import GemmConfig
from .tile_macros import Operands, TileBuffers, add_bias, add_tile, multiply, scale, store


def gemm_ar_one_shot(config: GemmConfig):
    """Build the kernel: C (M, N) is the sum over ranks of A (M, K) times B; every rank reads the
    tiles of all ranks and adds them.

    Every rank adds the same numbers, rounded to ``out_dtype``, in fp32 and in the same order. That
    is the order of the ranks, but each tile starts with another rank: ranks then do not all read
    from one rank at the same time.
    """
    M, N, ranks, tiles = config.M, config.N, config.ranks, config.tiles
    rows, columns = config.grid(M)

    @T.prim_func
    def gemm_ar_one_shot(
        A: T.Tensor((M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        C: T.Tensor((M, N), config.out_dtype),
    ):
        with T.Kernel(rows * columns, threads=tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            products = W.alloc_symmetric((M, N), config.out_dtype)  # own, for all ranks
            buffers = TileBuffers.alloc(config, tiles.N)

            me = W.rank()
            m, n = config.origin(block, M)
            multiply(config, A, (m,), B, n, buffers)
            scale(config, buffers.total, operands)
            store(buffers, (products, (me, m), n))

            T.clear(buffers.total)
            for step in T.serial(ranks):
                T.copy(products[(block + step) % ranks, m, n], buffers.C)
                add_tile(buffers.total, buffers.C)
            add_bias(config, buffers.total, operands, n)
            store(buffers, (C, (m,), n))

    return gemm_ar_one_shot


def gemm_ar_two_shot(config: GemmConfig):
    """Build the kernel, which computes what ``gemm_ar_one_shot`` does: the owner of each tile sums
    it up, and the other ranks read the sum from the owner.

    All ranks own the same number of tiles, in the order of ``W.swizzle_2d``; the last tiles may be
    outside C. An owner keeps its own product of a tile in fp32. It receives those of other ranks
    rounded to ``out_dtype`` and adds them in fp32, starting with the left neighbor's, which arrive
    first.
    """
    M, N, ranks, tiles = config.M, config.N, config.ranks, config.tiles
    rows, columns = config.grid(M)
    tiles_per_rank = ceil(rows * columns / ranks)

    @T.prim_func
    def gemm_ar_two_shot(
        A: T.Tensor((M, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        C: T.Tensor((M, N), config.out_dtype),
    ):
        with T.Kernel(ranks * tiles_per_rank, threads=tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            own_tiles = tiles_per_rank * tiles.M, tiles.N
            # Products of other ranks for the own tiles, and the sums of the own tiles.
            partials = W.alloc_symmetric((ranks, *own_tiles), config.out_dtype)
            sums = W.alloc_symmetric(own_tiles, config.out_dtype)
            buffers = TileBuffers.alloc(config, tiles.N)

            me = W.rank()
            owner, tile = W.swizzle_ranks(block, tiles_per_rank, me, ranks)
            m, n = config.origin(owner * tiles_per_rank + tile, M)
            multiply(config, A, (m,), B, n, buffers)
            scale(config, buffers.total, operands)
            if owner != me:
                store(buffers, (partials, (owner, me, tile * tiles.M), 0))
            else:
                for step in T.serial(ranks - 1):
                    source = (me + ranks - 1 - step) % ranks  # in the order of arrival
                    T.copy(partials[me, source, tile * tiles.M, 0], buffers.C)
                    add_tile(buffers.total, buffers.C)
                add_bias(config, buffers.total, operands, n)
                store(buffers, (sums, (me, tile * tiles.M), 0), (C, (m,), n))
                for step in T.serial(ranks - 1):
                    source = (me + 1 + step) % ranks
                    T.copy(sums[source, tile * tiles.M, 0], buffers.C)
                    T.copy(buffers.C, C[config.origin(source * tiles_per_rank + tile, M)])

    return gemm_ar_two_shot
