"""Blocks that communicate while others multiply: how many, and what each sends at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import tilelang.language as T
from tvm import tirx

from ...builtins import language as W
from ..core.tiles import DEVICE, PersistentSchedule, Tiles

_LEAST, _MOST = 16, 32
"""Blocks that communicate: fewer hold those up who wait for the rows of all; more than fill the
links."""
_PIECES = 8
"""In which rows are sent: those of a tile are multiplied as soon as the first are there."""
_LINE = 256
"""Bytes, of which a piece of a row has a multiple, so that it is stored without a gap."""
_STRIP_BYTES = 48 << 10
"""Sent at a time: what all threads of a block hold in registers."""


@dataclass(frozen=True)
class CommBlocks:
    """Blocks that store a rank's rows at others, strip by strip.

    Attributes:
        walk: of those that multiply.
        blocks: how many communicate, the first ones: nobody waits for a block that comes later.
        peers: ranks that get the rows, the right neighbour first.
        pieces, width: of rows, and their elements.
        height: rows of a strip, see ``Tiles.rows_at_once``.
        strips_per_piece: strips of a piece, for one rank.
        strips: that a rank sends.
    """

    walk: PersistentSchedule
    blocks: int
    peers: int
    pieces: int
    width: int
    height: int
    strips_per_piece: int
    strips: int

    @staticmethod
    def apart(share: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int) -> CommBlocks:
        """For all others, by blocks that do nothing else.

        Args:
            share, K: rows and columns of what each rank sends.
            N: columns of the product.
            itemsize: bytes of an element.
        """
        kept = min(_LEAST, DEVICE.sm_count // 2) if ranks > 1 else 0
        walk = PersistentSchedule.for_tiles(
            ranks * ceil(share / tiles.M) * ceil(N / tiles.N), DEVICE.sm_count - kept
        )
        line = _LINE // itemsize
        width = ceil(K / _PIECES / line) * line
        least = tiles.rows_at_once(width * itemsize)
        height = least * max(1, _STRIP_BYTES // (width * itemsize) // least)
        pieces, strips_per_piece = ceil(K / width), ceil(share / height)
        strips = pieces * strips_per_piece * (ranks - 1)
        blocks = min(_MOST, DEVICE.sm_count - walk.blocks, strips)
        return CommBlocks(walk, blocks, ranks - 1, pieces, width, height, strips_per_piece, strips)

    def behind(self, block: tirx.PrimExpr) -> tirx.PrimExpr:
        """The place of a block among those that walk, where communicating ones do not: theirs is
        negative."""
        return block - self.blocks


@T.macro
def send(A, gathered, sent, block, ranks):
    """Store A (share, K) at other ranks, in ``gathered`` of this rank (share, K or more, which are
    0): a strip of a piece at each, and then the next; block after block."""
    share, K = A.shape
    held = T.alloc_fragment((sent.height, sent.width), A.dtype)
    if block < sent.blocks:
        for turn in T.serial(T.ceildiv(sent.strips, sent.blocks)):
            number = turn * sent.blocks + block
            if number < sent.strips:
                at = number // sent.strips_per_piece
                peer = (W.rank() + 1 + at % sent.peers) % ranks
                m = number % sent.strips_per_piece * sent.height
                k = at // sent.peers * sent.width
                for i, j in T.Parallel(*held.shape):
                    inside = tirx.And(m + i < share, k + j < K)
                    held[i, j] = T.if_then_else(inside, A[m + i, k + j], 0)
                for i, j in T.Parallel(*held.shape):
                    if m + i < share:
                        gathered[peer, W.rank(), m + i, k + j] = held[i, j]
