"""Layout of rows that blocks move between tokens and experts."""

from dataclasses import dataclass
from math import ceil, gcd

import tilelang.language as T
import torch

from ...collectives.vectors import itemsize_of, words_of
from ...core.tiles import DEVICE

_VECTOR_BYTES = 16
"""Maximum number of bytes that a thread loads at once."""
_ROW_VECTORS = 8
"""Vectors of a row that a thread holds."""
_THREADS = 64, 1024
"""Minimum and maximum number of threads of a block, powers of two."""
_THREADS_PER_SM = 1024
"""Threads that move rows on an SM: with ``_ROW_VECTORS`` loads each, enough to cover the latency of
NVLink."""


@dataclass(frozen=True)
class RowLayout:
    """Division of rows into vectors and among threads.

    Attributes:
        vectors, width: number of vectors in a row, and elements of a vector.
        dtype: type of the elements in TileLang's spelling.
        threads: threads of a block.
        blocks: blocks that run at the same time.
    """

    vectors: int
    width: int
    dtype: str
    threads: int
    blocks: int

    @staticmethod
    def of(columns: int, dtype: str) -> "RowLayout":
        """Return the layout of rows with ``columns`` elements."""
        width = gcd(columns, _VECTOR_BYTES // itemsize_of(dtype))
        vectors, (minimum, maximum) = columns // width, _THREADS
        threads = 1 << (ceil(vectors / _ROW_VECTORS) - 1).bit_length()
        threads = min(max(threads, minimum), maximum)
        blocks = DEVICE.sm_count * _THREADS_PER_SM // threads
        return RowLayout(vectors, width, dtype, threads, blocks)

    @staticmethod
    def opaque(columns: int, dtype: torch.dtype) -> "RowLayout":
        """Return the layout of rows that are only moved, in the widest type."""
        word, words = words_of(columns * dtype.itemsize)
        return RowLayout.of(words, word)

    @property
    def padded(self) -> int:
        """Vectors of a row in registers: a multiple of the threads, which TileLang needs to
        distribute them."""
        return ceil(self.vectors / self.threads) * self.threads

    def shape(self, rows: int) -> tuple[int, int]:
        """Return the shape of a tensor with ``rows`` rows."""
        return rows * self.vectors, self.width


@T.macro
def load(layout, rows, number, row):
    """Load row ``number`` into registers."""
    for v, j in T.Parallel(layout.padded, layout.width):
        if v < layout.vectors:
            row[v, j] = rows[number * layout.vectors + v, j]


@T.macro
def put(layout, row, rows, number):
    """Store registers in row ``number``."""
    for v, j in T.Parallel(layout.padded, layout.width):
        if v < layout.vectors:
            rows[number * layout.vectors + v, j] = row[v, j]


@T.macro
def load_padded(layout, rows, place, number, row):
    """Load row ``number`` of the padded rows at ``place`` into registers."""
    for v, j in T.Parallel(layout.padded, layout.width):
        if v < layout.vectors:
            row[v, j] = rows[(*place, number * layout.padded + v, j)]


@T.macro
def put_padded(layout, row, rows, place, number):
    """Store registers in row ``number`` of the padded rows at ``place``. The store has no
    condition, so that one signal follows all rows of a block."""
    for v, j in T.Parallel(layout.padded, layout.width):
        rows[(*place, number * layout.padded + v, j)] = row[v, j]
