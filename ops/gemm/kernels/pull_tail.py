"""Pull of the last sums from other ranks by blocks that have no tile left to compute."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ....builtins import language as W
from ...core.gemm_config import GemmConfig
from ...core.tiles import Tiles

_MIN_STRIP_ROWS = 48
"""Least rows of a strip: each thread then has several loads of 16 bytes in flight."""


@dataclass(frozen=True)
class PullTail:
    """The last one of the ``Tiles.chunks`` of each owner, divided into strips of tiles.

    Attributes:
        rows_per_rank: rows of each owner.
        tiles: tiles in which the chunk is computed.
        first: index of its first tile among the owner's tiles.
        m, n: its first row and column among the owner's.
        rows, columns: its extents.
    """

    rows_per_rank: int
    tiles: Tiles
    first: int
    m: int
    n: int
    rows: int
    columns: int

    @staticmethod
    def last_chunk(config: GemmConfig) -> PullTail:
        """Return the tail of owners that have ``config.rows_per_rank`` rows."""
        tiles = config.tiles
        *before, (rows, columns) = tiles.chunks(config.rows_per_rank, config.N)
        first = len(before) * tiles.tiles_per_chunk(config.N)
        extents = rows.stop - rows.start, columns.stop - columns.start
        return PullTail(config.rows_per_rank, tiles, first, rows.start, columns.start, *extents)

    @property
    def granule(self) -> tuple[int, int]:
        """Extents of a tile: each is pulled as soon as it has arrived."""
        return min(self.tiles.M, self.rows), min(self.tiles.N, self.columns)

    @property
    def height(self) -> int:
        """Rows of a strip, see ``Tiles.rows_at_once``; an element of a sum has 2 bytes."""
        min_rows = self.tiles.rows_at_once(2 * self.tiles.N)
        return min_rows * max(1, _MIN_STRIP_ROWS // min_rows)

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
def pull(pulled_sums, C, tail, block, blocks, ranks):
    """Copy ``pulled_sums`` (rows, columns) of all other ranks to their rows of C.

    Blocks pull strips in turn.
    """
    strip_regs = T.alloc_fragment((tail.height, tail.tiles.N), C.dtype)
    strips = tail.strips * (ranks - 1)
    for wave in T.serial(ceil(strips / blocks)):
        strip = wave * blocks + block
        if strip < strips:
            owner = (W.rank() + 1 + strip % (ranks - 1)) % ranks
            m, top, n = tail.place(strip // (ranks - 1))
            row = owner * tail.rows_per_rank + tail.m + m + top
            height = T.min(tail.tiles.M - top, T.min(tail.rows - m - top, C.shape[0] - row))
            for i, j in T.Parallel(*strip_regs.shape):
                if i < height and n + j < tail.columns:
                    strip_regs[i, j] = pulled_sums[owner, m + top + i, n + j]
            for i, j in T.Parallel(*strip_regs.shape):
                if i < height and n + j < tail.columns:
                    C[row + i, tail.n + n + j] = strip_regs[i, j]
