"""Pull of the last sums from other ranks by blocks that have no tile left to compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ...builtins import language as W
from ..core.tiles import Tiles

_ROWS = 48
"""Least rows of a strip: each thread then has several loads of 16 bytes in flight."""


@dataclass(frozen=True)
class PullTail:
    """The last one of the ``Tiles.chunks`` of each owner, divided into strips of tiles.

    Attributes:
        tiles: tiles in which the chunk is computed.
        first: index of its first tile among the owner's tiles.
        m, n: its first row and column among the owner's.
        rows, columns: its extents.
    """

    tiles: Tiles
    first: int
    m: int
    n: int
    rows: int
    columns: int

    @staticmethod
    def last_chunk(rows_per_rank: int, N: int, tiles: Tiles) -> PullTail:
        """Return the tail of an owner that has ``rows_per_rank`` rows and N columns."""
        *before, (rows, columns) = tiles.chunks(rows_per_rank, N)
        extents = rows.stop - rows.start, columns.stop - columns.start
        return PullTail(
            tiles, len(before) * tiles.tiles_per_chunk(N), rows.start, columns.start, *extents
        )

    @property
    def granule(self) -> tuple[int, int]:
        """Extents of a tile: each is pulled as soon as it has arrived."""
        return min(self.tiles.M, self.rows), min(self.tiles.N, self.columns)

    @property
    def height(self) -> int:
        """Rows of a strip, see ``Tiles.rows_at_once``; an element of a sum has 2 bytes."""
        least = self.tiles.rows_at_once(2 * self.tiles.N)
        return least * max(1, _ROWS // least)

    @property
    def strips_per_tile(self) -> int:
        """Number of strips of a tile."""
        return ceil(self.tiles.M / self.height)

    @property
    def strips(self) -> int:
        """Number of strips of one owner."""
        rows, columns = self._counts
        return rows * columns * self.strips_per_tile

    @property
    def _counts(self) -> tuple[int, int]:
        """Number of rows and of columns of tiles."""
        return ceil(self.rows / self.tiles.M), ceil(self.columns / self.tiles.N)

    def place(self, strip: Any) -> tuple[Any, Any, Any]:
        """Return the first row of a strip's tile, the strip's first row in the tile, and its first
        column. Strips are numbered in the order in which tiles are computed."""
        rows, columns = self._counts
        row, column = W.swizzle_2d(strip // self.strips_per_tile, rows, columns, self.tiles.group_m)
        return row * self.tiles.M, strip % self.strips_per_tile * self.height, column * self.tiles.N


@T.macro
def pull(rest, C, rows_per_rank, tail, block, blocks, ranks):
    """Copy ``rest`` (rows, columns) of all other ranks to their rows of C.

    Each owner has ``rows_per_rank`` rows of C. Blocks pull strips in turn.
    """
    held = T.alloc_fragment((tail.height, tail.tiles.N), C.dtype)
    strips = tail.strips * (ranks - 1)
    for turn in T.serial(ceil(strips / blocks)):
        number = turn * blocks + block
        if number < strips:
            owner = (W.rank() + 1 + number % (ranks - 1)) % ranks
            m, top, n = tail.place(number // (ranks - 1))
            above = owner * rows_per_rank + tail.m + m + top
            height = T.min(tail.tiles.M - top, T.min(tail.rows - m - top, C.shape[0] - above))
            for i, j in T.Parallel(*held.shape):
                if i < height and n + j < tail.columns:
                    held[i, j] = rest[owner, m + top + i, n + j]
            for i, j in T.Parallel(*held.shape):
                if i < height and n + j < tail.columns:
                    C[above + i, tail.n + n + j] = held[i, j]
