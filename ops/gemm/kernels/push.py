"""Stores of a rank's rows at all ranks by blocks that multiply afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import tilelang.language as T
from tilelang import tvm

from ....builtins import language as W
from ....passes.sync.regions.symbols import product
from ...core.gemm_config import GemmConfig
from ...core.tiles import max_push_blocks

_LINE = 128
"""Bytes: a chunk of a row is a multiple of this, so that it is stored without gaps."""


@dataclass(frozen=True)
class PushBlocks:
    """First blocks of a grid, each of which stores some columns of the own rows.

    Attributes:
        peers_at_once: number of ranks to which blocks store at the same time: all of them, unless
            there are fewer blocks.
        num_chunks, width: chunks of a row, and elements of a chunk; a block stores one chunk.
        height: rows that the threads of a block store, see ``Tiles.rows_at_once``: one of a few
            numbers, because each is another kernel.
    """

    peers_at_once: int
    num_chunks: int
    width: int
    height: int

    @staticmethod
    def of(config: GemmConfig) -> PushBlocks:
        """Return the blocks of a kernel with one block for each tile of the gathered rows."""
        rows, columns = config.grid(config.M)
        blocks = min(rows * columns, max_push_blocks())
        peers_at_once = min(blocks, config.ranks)
        line = _LINE // tvm.DataType(config.dtype).itemsize
        width = ceil(config.K / (blocks // peers_at_once) / line) * line
        min_rows = config.tiles.rows_at_once(_LINE)
        height = 4 * min_rows
        while height < config.rows_per_rank:
            height *= 4
        return PushBlocks(peers_at_once, ceil(config.K / width), width, height)


@T.macro
def push(A, gathered, senders, block, ranks):
    """Store A (rows_per_rank, K) at all ranks, in this rank's rows of their ``gathered``.

    ``gathered`` may have more than K columns: those after K become 0.
    """
    rows_per_rank, K = A.shape
    me = W.rank()
    first_row = product(me, int(rows_per_rank))
    first, chunk = block % senders.peers_at_once, block // senders.peers_at_once
    if chunk < senders.num_chunks:
        for step in T.serial(T.ceildiv(ranks - first, senders.peers_at_once)):
            peer = (me + 1 + first + step * senders.peers_at_once) % ranks
            for i, j in T.Parallel(senders.height, senders.width):
                k = chunk * senders.width + j
                if i < rows_per_rank:
                    gathered[peer, first_row + i, k] = T.if_then_else(k < K, A[i, k], 0)
