"""All-gather + GEMM kernels: they multiply rows of other ranks that copy engines or blocks send."""

import tilelang.language as T

from ....builtins import language as W
from ....passes import split_options
from ....passes.sync.regions.symbols import product
from ...core.gemm_config import GemmConfig
from ...core.tiles import DEVICE, PersistentSchedule
from .comm_blocks import CommBlocks, send
from .push import PushBlocks, push
from .tile_macros import (
    Operands,
    TileBuffers,
    accumulate,
    add_bias,
    load_b,
    multiply,
    scale,
    store,
)


def ag_gemm_copy_engine(config: GemmConfig):
    """Build the kernel: C (ranks, rows_per_rank, N) is the A (rows_per_rank, K) of every rank
    times B.

    The kernel reads the own rows in A and the rows of other ranks in gathered (ranks,
    rows_per_rank, K), where copies write them. Blocks are persistent, see ``PersistentSchedule``.
    """
    ranks, rows_per_rank = config.ranks, config.rows_per_rank
    # No block needs another one, so all SMs may run blocks, although one of these may start later.
    schedule = PersistentSchedule.for_tiles(ranks * config.tiles_per_rank, DEVICE.sm_count)

    @T.prim_func
    def ag_gemm_copy_engine(
        A: T.Tensor((rows_per_rank, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        gathered: W.Symmetric((ranks, rows_per_rank, config.K), config.dtype),
        C: T.Tensor((ranks, rows_per_rank, config.N), config.out_dtype),
    ):
        with T.Kernel(schedule.blocks, threads=config.tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            ag_gemm_tiles(config, operands, gathered, C, schedule, block)

    return ag_gemm_copy_engine


def ag_gemm_comm_blocks(config: GemmConfig):
    """Build the kernel, which computes what ``ag_gemm_copy_engine`` does; some of its blocks only
    store the own rows at other ranks.

    They store one chunk of the rows at all ranks before they store the next chunk. This program is
    for few rows and many ranks, where copies need more time to start than to transfer.
    """
    ranks, rows_per_rank = config.ranks, config.rows_per_rank
    senders = CommBlocks.of(config)
    schedule = senders.schedule

    @T.prim_func
    def ag_gemm_comm_blocks(
        A: T.Tensor((rows_per_rank, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        C: T.Tensor((ranks, rows_per_rank, config.N), config.out_dtype),
    ):
        with T.Kernel(senders.blocks + schedule.blocks, threads=config.tiles.threads) as block:
            operands = Operands(A, B, bias, scale_a, scale_b)
            gathered = None
            if ranks > 1:
                gathered = W.alloc_symmetric(
                    (ranks, rows_per_rank, senders.num_chunks * senders.width), config.dtype
                )
                send(A, gathered, senders, block, ranks)
            ag_gemm_tiles(config, operands, gathered, C, schedule, senders.schedule_index(block))

    granules = {"gathered": (1, rows_per_rank, senders.width)} if ranks > 1 else {}
    return split_options(ag_gemm_comm_blocks, {"tileweave.granule": granules})[0]


def ag_gemm_push(config: GemmConfig):
    """Build the kernel for few rows: C (M, N) is the A (rows_per_rank, K) of every rank times B;
    blocks store the own rows at all ranks, then multiply.

    The stores arrive before a copy engine would start.
    """
    tiles, (rows, columns) = config.tiles, config.grid(config.M)
    senders = PushBlocks.of(config)
    gathered_shape = config.M, senders.num_chunks * senders.width

    @T.prim_func
    def ag_gemm_push(
        A: T.Tensor((config.rows_per_rank, config.K), config.dtype),
        B: config.B,
        bias: config.bias,
        scale_a: config.scale,
        scale_b: config.scale,
        C: T.Tensor((config.M, config.N), config.out_dtype),
    ):
        with T.Kernel(rows, columns, threads=tiles.threads) as (row, column):
            operands = Operands(A, B, bias, scale_a, scale_b)
            gathered = W.alloc_symmetric(gathered_shape, config.dtype)
            buffers = TileBuffers.alloc(config, tiles.N)

            push(A, gathered, senders, product(column, rows) + row, config.ranks)
            m, n = row * tiles.M, column * tiles.N
            multiply(config, gathered, (W.rank(), m), B, n, buffers)
            scale(config, buffers.total, operands)
            add_bias(config, buffers.total, operands, n)
            store(buffers, (C, (m,), n))

    # One granule for all rows: a check for each tile would cost as much time as the tile itself.
    return split_options(ag_gemm_push, {"tileweave.granule": {"gathered": gathered_shape}})[0]


@T.macro
def ag_gemm_tiles(config, operands, gathered, C, schedule, schedule_index):
    """Compute the tiles of C (ranks, rows_per_rank, N) with persistent blocks.

    The own rows are in A. The rows of other ranks arrive in ``gathered`` (ranks, rows_per_rank, K
    or more); tiles are computed in the order of arrival.

    Args:
        schedule_index: index of this block in ``schedule``; a block with a negative one computes
            nothing.
    """
    ranks, tiles, tiles_per_rank = config.ranks, config.tiles, config.tiles_per_rank
    buffers = TileBuffers.alloc(config, tiles.width)

    me = W.rank()
    for wave in T.serial(schedule.waves):
        wave_begin = wave * schedule.blocks
        index = wave_begin + schedule_index
        if index >= wave_begin and index < schedule.tiles:
            source = (me + ranks - index // tiles_per_rank) % ranks
            m, n = config.origin(index % tiles_per_rank, config.rows_per_rank)

            T.clear(buffers.total)
            for step in T.Pipelined(T.ceildiv(config.K, tiles.K), num_stages=tiles.stages):
                k = step * tiles.K
                if ranks == 1 or source == me:
                    T.copy(operands.A[m, k], buffers.A)
                else:
                    T.copy(gathered[me, source, m, k], buffers.A)
                load_b(config, operands.B, n, k, buffers.B)
                accumulate(config, buffers)
            scale(config, buffers.total, operands)
            add_bias(config, buffers.total, operands, n)
            store(buffers, (C, (source, m), n))
