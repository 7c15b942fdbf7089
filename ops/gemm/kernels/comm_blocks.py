"""Blocks that communicate while others multiply: their number and the strips that each sends."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import tilelang.language as T
from tilelang import tvm
from tvm import tirx

from ....builtins import language as W
from ...core.gemm_config import GemmConfig
from ...core.tiles import DEVICE, PersistentSchedule, Tiles

_MIN_BLOCKS, _MAX_BLOCKS = 16, 32
"""Bounds of the blocks that communicate. Fewer blocks delay those that need the rows of all ranks;
more saturate the links."""
_CHUNKS = 8
"""Chunks of a row: a tile is multiplied as soon as the first chunk of its rows has arrived."""
_LINE = 256
"""Bytes: a chunk of a row is a multiple of this, so that it is stored without gaps."""
_STRIP_BYTES = 48 << 10
"""Bytes that a block sends at a time: its threads hold them in registers."""


@dataclass(frozen=True)
class CommBlocks:
    """Blocks that store a rank's rows at others, strip by strip.

    Attributes:
        schedule: schedule of the blocks that multiply.
        blocks: number of blocks that communicate. They are the first ones of the grid, because no
            block may wait for a later one.
        peers: number of ranks that receive the rows, the right neighbor first.
        num_chunks, width: chunks of a row, and elements of a chunk.
        height: rows of a strip, see ``Tiles.rows_at_once``.
        strips_per_chunk: strips of a chunk that one peer receives.
        strips: strips that a rank sends in all.
    """

    schedule: PersistentSchedule
    blocks: int
    peers: int
    num_chunks: int
    width: int
    height: int
    strips_per_chunk: int
    strips: int

    @staticmethod
    def of(config: GemmConfig) -> CommBlocks:
        """Return ``dedicated`` blocks of a kernel."""
        return CommBlocks.dedicated(
            config.rows_per_rank, config.N, config.K, config.ranks, config.tiles,
            tvm.DataType(config.dtype).itemsize,
        )  # fmt: skip

    @staticmethod
    def dedicated(
        rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int
    ) -> CommBlocks:
        """Return the blocks that send the rows of a rank to all peers and do nothing else.

        Args:
            rows_per_rank, K: rows and columns that each rank sends.
            N: columns of the product.
            itemsize: bytes of an element.
        """
        reserved = min(_MIN_BLOCKS, DEVICE.sm_count // 2) if ranks > 1 else 0
        schedule = PersistentSchedule.for_tiles(
            ranks * ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N), DEVICE.sm_count - reserved
        )
        line = _LINE // itemsize
        width = ceil(K / _CHUNKS / line) * line
        min_rows = tiles.rows_at_once(width * itemsize)
        height = min_rows * max(1, _STRIP_BYTES // (width * itemsize) // min_rows)
        num_chunks, strips_per_chunk = ceil(K / width), ceil(rows_per_rank / height)
        strips = num_chunks * strips_per_chunk * (ranks - 1)
        blocks = min(_MAX_BLOCKS, DEVICE.sm_count - schedule.blocks, strips)
        return CommBlocks(
            schedule, blocks, ranks - 1, num_chunks, width, height, strips_per_chunk, strips
        )

    def schedule_index(self, block: tirx.PrimExpr) -> tirx.PrimExpr:
        """Return the index of a block in ``schedule``; negative for blocks that communicate."""
        return block - self.blocks


@T.macro
def send(A, gathered, senders, block, ranks):
    """Store A (rows_per_rank, K) at the other ranks, in their ``gathered`` of this rank.

    All strips of a chunk go to one rank, then to the next rank; then follows the next chunk. Blocks
    send strips in turn. ``gathered`` may have more than K columns: those after K become 0.
    """
    rows_per_rank, K = A.shape
    strip_regs = T.alloc_fragment((senders.height, senders.width), A.dtype)
    if block < senders.blocks:
        for wave in T.serial(T.ceildiv(senders.strips, senders.blocks)):
            strip = wave * senders.blocks + block
            if strip < senders.strips:
                chunk_of_peer = strip // senders.strips_per_chunk
                peer = (W.rank() + 1 + chunk_of_peer % senders.peers) % ranks
                m = strip % senders.strips_per_chunk * senders.height
                k = chunk_of_peer // senders.peers * senders.width
                for i, j in T.Parallel(*strip_regs.shape):
                    in_bounds = tirx.And(m + i < rows_per_rank, k + j < K)
                    strip_regs[i, j] = T.if_then_else(in_bounds, A[m + i, k + j], 0)
                for i, j in T.Parallel(*strip_regs.shape):
                    if m + i < rows_per_rank:
                        gathered[peer, W.rank(), m + i, k + j] = strip_regs[i, j]
