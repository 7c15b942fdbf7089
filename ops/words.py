"""In which words data is moved that is not added, and in which pieces."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import tilelang.language as T
import torch

from ..runtime.parameters import Parameter

TILE, _BLOCKS = 1 << 15, 256
"""Bytes that a block moves at a time, 128 for each of 256 threads, where so many blocks have as
much, about two for each SM; else half of that. Measured with 8 times as much and more."""
COLUMNS, _HEIGHT = 256, 256
"""What the TMA moves at once is no more than this, along each axis. Powers of two: TileLang wants
threads to share a tile evenly, and only of these moves 16 bytes at a time."""
_PIECE, _PIECES = 2 << 20, 8
"""Bytes that copy engines bring at a time at least, and how many pieces there are at most for a
peer: each costs about 5 us, and what a kernel does with the last one comes when nothing is under
way any more. More were slower; fewer are not measured."""


def words_of(nbytes: int) -> tuple[str, int]:
    """The widest type that kernels move without knowing what it means, and how many there are."""
    return ("int32", nbytes // 4) if nbytes % 4 == 0 else ("uint8", nbytes)


def as_declared(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """A contiguous tensor, in the words and the shape of a parameter."""
    flat = tensor.view(-1)
    dtype = getattr(torch, parameter.dtype)
    if flat.dtype != dtype:
        flat = flat.view(torch.uint8).view(dtype)
    return flat.view(parameter.extents)


def itemsize_of(dtype: str) -> int:
    """Bytes of an element, by TileLang's name of the type."""
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class Lines:
    """Elements in memory as lines of one length, so that what is right for one is for all: threads
    move it in words of 16 bytes, and the TMA as boxes.

    Attributes:
        rows, columns: lines, and elements of one.
        height: lines that a block moves at a time.
        dtype: TileLang's name of the type.
    """

    rows: int
    columns: int
    height: int
    dtype: str

    @staticmethod
    def of(count: int, dtype: str, columns: int = COLUMNS, tile: int | None = None) -> Lines:
        """``count`` elements.

        Args:
            columns: elements of a line at most, a power of two.
            tile: bytes that a block moves at a time, a power of two; by default ``tile_bytes``.
        """
        columns, tile = gcd(count, columns), tile or tile_bytes(count * itemsize_of(dtype))
        return Lines(count // columns, columns, height_of(columns, dtype, tile), dtype)

    @property
    def tiles(self) -> int:
        """How many tiles there are; the last one may be less."""
        return ceil(self.rows / self.height)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of one."""
        return self.height, self.columns

    @property
    def pieces(self) -> list[slice]:
        """The lines that copy engines bring together."""
        return pieces_of(self.rows, self.height, self.columns * itemsize_of(self.dtype))


def tile_bytes(nbytes: int) -> int:
    """What a block moves at a time of so many bytes, which blocks share."""
    return TILE if nbytes >= _BLOCKS * TILE else TILE // 2


def height_of(columns: int, dtype: str, tile: int) -> int:
    """Rows of so many elements that a block moves at a time, of ``tile`` bytes at most if a row has
    no more."""
    return max(1, min(tile // (columns * itemsize_of(dtype)), _HEIGHT))


def alloc_of(transport: str) -> Any:
    """Where a tile is on its way: in shared memory for the TMA, in registers for threads."""
    return {"tma": T.alloc_shared, "ldst": T.alloc_fragment}[transport]


def pieces_of(rows: int, height: int, nbytes: int) -> list[slice]:
    """The rows that copy engines bring together, few and large: all but the last of as many tiles.

    Args:
        height: rows of a tile.
        nbytes: of a row.
    """
    length = height * max(ceil(_PIECE / (height * nbytes)), ceil(ceil(rows / height) / _PIECES))
    return [slice(low, min(low + length, rows)) for low in range(0, rows, length)]
