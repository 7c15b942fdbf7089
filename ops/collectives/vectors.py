"""In which words data is moved that is not added, in which pieces, and to whom first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd
from typing import Any

import tilelang.language as T
import torch
from tvm import tirx

from ...runtime.plans.parameters import Parameter
from ..core.problem import packed
from ..core.tiles import DEVICE

TILE, _BLOCKS = 1 << 15, 256
"""Bytes that a block moves at a time, 128 for each of 256 threads, where so many blocks have as
much, about two for each SM; else half of that. Measured with 8 times as much and more."""
COLUMNS, _HEIGHT = 256, 256
"""What the TMA moves at once is no more than this, along each axis. Powers of two: TileLang wants
threads to share a tile evenly, and only of these moves 16 bytes at a time."""
WALKERS = 2 * (DEVICE.sm_count - 1)
"""Blocks that put to its place what copy engines bring: all that wait read one word, and a thousand
at a time hold up what arrives, as fewer blocks hold up the copying (benchmarks/LOG.md)."""
_PACE = 10
"""Bytes that a kernel reads or writes in own memory while copy engines bring one: of 4 TB/s and
0.38."""
_PIECE, _PIECES = 24 << 20, 4
"""Bytes that a kernel reads or writes in the time that one more piece and its flag cost copy
engines, 5 to 6 us; and how many pieces there are at most."""


def words_of(nbytes: int) -> tuple[str, int]:
    """The widest type that kernels move without knowing what it means, and how many there are."""
    return ("int32", nbytes // 4) if nbytes % 4 == 0 else ("uint8", nbytes)


def as_declared(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """A contiguous tensor, in the words and the shape of a parameter."""
    flat = packed(tensor).view(-1)
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

    def pieces(self, moved: int = 2) -> list[slice]:
        """The lines that copy engines bring the last peer together; see ``pieces_of``."""
        return pieces_of(self.rows, self.height, self.columns * itemsize_of(self.dtype), moved)


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


def pieces_of(rows: int, height: int, nbytes: int, moved: int = 2) -> list[slice]:
    """The rows that copy engines bring the last peer together: few, and smaller towards the end.

    The kernel is to be done with a piece when what is behind it has come. So each is as many times
    longer than that as the kernel is faster than copy engines; and what is behind it is cut again
    while the kernel takes longer for it than a piece costs. All begin at multiples of the last
    one's length, so that flags for as many rows each serve all.

    Args:
        height: rows of a tile.
        nbytes: of a row.
        moved: bytes that the kernel reads and writes for each that arrives; a copy does so once.
    """
    times = max(2, round(_PACE / moved) + 1)
    cuts = 0
    while cuts < _PIECES - 1 and rows * nbytes * moved > _PIECE * times**cuts:
        cuts += 1
    length = height * ceil(rows / (height * times**cuts))
    units = ceil(rows / length)
    starts = [(units - times**cut) * length for cut in reversed(range(cuts))]
    starts = [0, *(start for start in starts if start > 0)]
    return [slice(*ends) for ends in pairwise([*starts, rows])]


def copies_to(peers: Iterable[int], pieces: Sequence[slice]) -> Iterator[tuple[int, slice]]:
    """(peer, rows) of what copy engines bring, in this order: all rows at once to each peer, but in
    pieces to the last.

    On 4 H200 a further copy costs 3 us, its flag 2, and another peer than before 6. And the kernel
    is done with what others brought while the pieces from the last one are on their way.
    """
    peers, whole = list(peers), slice(pieces[0].start, pieces[-1].stop)
    for peer in peers:
        for piece in pieces if peer == peers[-1] else [whole]:
            yield peer, piece


def collected(
    number: tirx.PrimExpr, me: tirx.PrimExpr, tiles: int, ranks: int
) -> tuple[tirx.PrimExpr, ...]:
    """What is copied to its place as the ``number``-th, of as many tiles from each rank: how many
    ranks come before, the rank, and the tile. Own ones come first, then those that arrive first."""
    before = number // tiles
    return before, (me + ranks - before) % ranks, number % tiles
