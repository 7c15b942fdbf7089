"""Blocks that communicate while the others multiply: how many, and what each sends at a time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import tilelang.language as T
from tvm import tirx

from .. import language as W
from .tiles import SMS, Tiles, Walk

_LEAST, _MOST = 16, 32
"""Blocks that communicate: fewer hold the others up, more than fill the links."""
_PIECES = 8
"""In which rows are sent: those of a tile are multiplied as soon as the first are there."""
_LINE = 256
"""Bytes, of which a piece of a row has a multiple, so that it is stored without a gap."""
_STRIP_BYTES = 48 << 10
"""Sent at a time: what all threads of a block hold in registers."""


@dataclass(frozen=True)
class Communicating:
    """Blocks that store a rank's rows at all others, strip by strip; others walk over tiles.

    Attributes:
        walk: of those that multiply.
        blocks: how many communicate, the first ones.
        pieces, width: of rows, and their elements.
        height: rows of a strip, see ``Tiles.rows_at_once``.
        of_piece: strips of a piece, for one rank.
        strips: that a rank sends.
    """

    walk: Walk
    blocks: int
    pieces: int
    width: int
    height: int
    of_piece: int
    strips: int

    @staticmethod
    def of(share: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int) -> Communicating:
        """
        Args:
            share, K: rows and columns of what each rank sends.
            N: columns of the product.
            itemsize: bytes of an element.
        """
        line = _LINE // itemsize
        width = ceil(K / _PIECES / line) * line
        least = tiles.rows_at_once(width * itemsize)
        height = least * max(1, _STRIP_BYTES // (width * itemsize) // least)
        pieces, of_piece = ceil(K / width), ceil(share / height)
        kept = min(_LEAST, SMS // 2) if ranks > 1 else 0
        walk = Walk.over(ranks * ceil(share / tiles.M) * ceil(N / tiles.N), SMS - kept)
        strips = pieces * of_piece * (ranks - 1)
        blocks = min(_MOST, SMS - walk.blocks, strips)
        return Communicating(walk, blocks, pieces, width, height, of_piece, strips)


@T.macro
def send(A, gathered, sent, block, ranks):
    """Store A (share, K) at all other ranks, in this rank's place in ``gathered`` (ranks, share,
    K or more, which are 0): a strip of a piece at each, and then the next; block after block."""
    share, K = A.shape
    held = T.alloc_fragment((sent.height, sent.width), A.dtype)
    if block < sent.blocks:
        for turn in T.serial(T.ceildiv(sent.strips, sent.blocks)):
            number = turn * sent.blocks + block
            if number < sent.strips:
                place = number // sent.of_piece
                peer = (W.rank() + 1 + place % (ranks - 1)) % ranks
                m = number % sent.of_piece * sent.height
                k = place // (ranks - 1) * sent.width
                for i, j in T.Parallel(*held.shape):
                    inside = tirx.And(m + i < share, k + j < K)
                    held[i, j] = T.if_then_else(inside, A[m + i, k + j], 0)
                for i, j in T.Parallel(*held.shape):
                    if m + i < share:
                        gathered[peer, W.rank(), m + i, k + j] = held[i, j]
