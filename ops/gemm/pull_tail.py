"""What blocks of a kernel fetch from other ranks themselves, when they have nothing else to do."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ...builtins import language as W
from ..core.tiles import Tiles

_ROWS = 48
"""Of a strip at least: each thread has 16 bytes of it under way several times."""


@dataclass(frozen=True)
class PullTail:
    """The last of the ``Tiles.pieces`` of what each rank owns, in strips of tiles.

    Attributes:
        tiles: in which it is computed.
        first: number of its first tile among the owner's.
        m, n: where it begins.
        rows, columns: of it.
    """

    tiles: Tiles
    first: int
    m: int
    n: int
    rows: int
    columns: int

    @staticmethod
    def of(share: int, N: int, tiles: Tiles) -> PullTail:
        """
        Args:
            share, N: rows and columns of what a rank owns.
        """
        *before, (rows, columns) = tiles.pieces(share, N)
        extents = rows.stop - rows.start, columns.stop - columns.start
        return PullTail(
            tiles, len(before) * tiles.tiles_per_chunk(N), rows.start, columns.start, *extents
        )

    @property
    def granule(self) -> tuple[int, int]:
        """What is fetched as soon as it is there: a tile."""
        return min(self.tiles.M, self.rows), min(self.tiles.N, self.columns)

    @property
    def height(self) -> int:
        """Of a strip, see ``Tiles.rows_at_once``; sums have 2 bytes."""
        least = self.tiles.rows_at_once(2 * self.tiles.N)
        return least * max(1, _ROWS // least)

    @property
    def of_tile(self) -> int:
        """Strips of a tile."""
        return ceil(self.tiles.M / self.height)

    @property
    def strips(self) -> int:
        """Of one rank."""
        rows, columns = self._counts
        return rows * columns * self.of_tile

    @property
    def _counts(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return ceil(self.rows / self.tiles.M), ceil(self.columns / self.tiles.N)

    def place(self, strip: Any) -> tuple[Any, Any, Any]:
        """Row of the tile of a strip, first row of the strip there, and column; in the order in
        which tiles are computed."""
        rows, columns = self._counts
        row, column = W.swizzle_2d(strip // self.of_tile, rows, columns, self.tiles.group_m)
        return row * self.tiles.M, strip % self.of_tile * self.height, column * self.tiles.N


@T.macro
def fetch(rest, C, share, fetched, block, blocks, ranks):
    """Copy ``rest`` (rows, columns) of all other ranks to their rows of C, of which each has
    ``share``; each block a strip at a time."""
    held = T.alloc_fragment((fetched.height, fetched.tiles.N), C.dtype)
    strips = fetched.strips * (ranks - 1)
    for turn in T.serial(ceil(strips / blocks)):
        number = turn * blocks + block
        if number < strips:
            owner = (W.rank() + 1 + number % (ranks - 1)) % ranks
            m, top, n = fetched.place(number // (ranks - 1))
            above = owner * share + fetched.m + m + top
            height = T.min(fetched.tiles.M - top, T.min(fetched.rows - m - top, C.shape[0] - above))
            for i, j in T.Parallel(*held.shape):
                if i < height and n + j < fetched.columns:
                    held[i, j] = rest[owner, m + top + i, n + j]
            for i, j in T.Parallel(*held.shape):
                if i < height and n + j < fetched.columns:
                    C[above + i, fetched.n + n + j] = held[i, j]
