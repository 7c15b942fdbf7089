"""Layout of collectives: types of vectors, tiles, and the order of copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd

import torch
from tvm import tirx

from ...passes import with_options
from ..core.tiles import DEVICE

TILE, _BLOCKS = 1 << 15, 256
"""Bytes of a tile: 128 for each of 256 threads, if ``_BLOCKS`` blocks have one each, about two per
SM; else half of that. Measured at 8 times this size and more."""
COLUMNS, _MAX_HEIGHT = 256, 256
"""Maximum numbers of columns and rows of a tile. Powers of two, because only then TileLang shares a
tile evenly among threads and moves 16 bytes at a time."""
COLLECT_BLOCKS = 2 * (DEVICE.sm_count - 1)
"""Blocks of the kernel that copies to the result what copy engines write. All waiting blocks poll
one flag: a thousand of them delay the data that arrives, and fewer blocks copy more slowly
(benchmarks/LOG.md)."""
LL_TILE = 1 << 11
"""Bytes of a tile that is exchanged by words with flags: for each of 256 threads the data of two
words, one access. So a block waits for the latency of one access of each peer."""
_KERNEL_TO_COPY_RATE = 10
"""Bytes that a kernel reads or writes in local memory while copy engines transfer one byte: 4 TB/s
against 0.38 TB/s."""
_CHUNK_BYTES, _MAX_CHUNKS = 24 << 20, 4
"""Bytes that a kernel reads or writes in 5 to 6 us, the time that copy engines need for one more
chunk and its flag; and the most chunks."""


def words_of(nbytes: int) -> tuple[str, int]:
    """Return the widest type in which kernels can move ``nbytes`` bytes of opaque data, and the
    number of elements."""
    return ("int32", nbytes // 4) if nbytes % 4 == 0 else ("uint8", nbytes)


def with_ll_protocol(program: tirx.PrimFunc, *tensors: str) -> tirx.PrimFunc:
    """Return a program whose ranks exchange these symmetric tensors by words of data and a flag, as
    NCCL's protocol LL does, without signals and waits."""
    return with_options(program, {"tileweave.protocol": dict.fromkeys(tensors, "ll")})


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of a TileLang type."""
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class TiledView:
    """View of contiguous elements as rows of one length, in tiles of whole rows, so that threads
    move 16-byte vectors.

    Attributes:
        rows, columns: number of rows, and elements of a row.
        height: rows of a tile.
        dtype: TileLang's name of the type.
    """

    rows: int
    columns: int
    height: int
    dtype: str

    @staticmethod
    def of(count: int, dtype: str, columns: int = COLUMNS, tile: int | None = None) -> TiledView:
        """Return the view of ``count`` elements.

        Args:
            columns: most elements of a row, a power of two.
            tile: bytes of a tile, a power of two; by default ``tile_bytes``.
        """
        columns, tile = gcd(count, columns), tile or tile_bytes(count * itemsize_of(dtype))
        return TiledView(count // columns, columns, height_of(columns, dtype, tile), dtype)

    @property
    def tiles(self) -> int:
        """Number of tiles; the last may be partial."""
        return ceil(self.rows / self.height)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def tile(self) -> tuple[int, int]:
        """Shape of a tile."""
        return self.height, self.columns

    def chunks(self, moved: int = 2) -> list[slice]:
        """Return the slices of rows that copy engines write to the last peer; see
        ``chunks_of``."""
        return chunks_of(self.rows, self.height, self.columns * itemsize_of(self.dtype), moved)


def tile_bytes(nbytes: int) -> int:
    """Return the bytes of a tile if blocks share ``nbytes`` bytes."""
    return TILE if nbytes >= _BLOCKS * TILE else TILE // 2


def height_of(columns: int, dtype: str, tile: int) -> int:
    """Return the number of rows in a tile of at most ``tile`` bytes, at least 1, for rows of
    ``columns`` elements."""
    return max(1, min(tile // (columns * itemsize_of(dtype)), _MAX_HEIGHT))


def chunks_of(rows: int, height: int, nbytes: int, moved: int = 2) -> list[slice]:
    """Return the slices of rows that copy engines write to the last peer: few, and shorter towards
    the end.

    The kernel should finish a chunk when the rest has arrived. So each chunk is longer than the
    rest by the factor by which the kernel is faster than copy engines. The rest is split again
    while the kernel needs longer for it than a chunk costs. All chunks begin at multiples of the
    last one's length, so that flags of equal row counts serve all chunks.

    Args:
        height: rows of a tile.
        nbytes: bytes of a row.
        moved: bytes that the kernel reads and writes for each byte that arrives; 2 for a copy.
    """
    ratio = max(2, round(_KERNEL_TO_COPY_RATE / moved) + 1)
    cuts = 0
    while cuts < _MAX_CHUNKS - 1 and rows * nbytes * moved > _CHUNK_BYTES * ratio**cuts:
        cuts += 1
    length = height * ceil(rows / (height * ratio**cuts))
    units = ceil(rows / length)
    starts = [(units - ratio**cut) * length for cut in reversed(range(cuts))]
    starts = [0, *(start for start in starts if start > 0)]
    return [slice(*ends) for ends in pairwise([*starts, rows])]


def copies_to(peers: Iterable[int], chunks: Sequence[slice]) -> Iterator[tuple[int, slice]]:
    """Yield (peer, rows) of each copy, in order: all rows at once to each peer, but in chunks to
    the last.

    On 4 H200 a further copy costs 3 us, its flag 2, and a change of the peer 6. The kernel finishes
    what other ranks wrote while the chunks from the last one are in flight.
    """
    peers, all_rows = list(peers), slice(chunks[0].start, chunks[-1].stop)
    for peer in peers:
        for chunk in chunks if peer == peers[-1] else [all_rows]:
            yield peer, chunk


def locate_collected_tile(
    number: tirx.PrimExpr, me: tirx.PrimExpr, tiles: int, ranks: int
) -> tuple[tirx.PrimExpr, ...]:
    """Return the place of the ``number``-th tile that is copied to the result: how many ranks come
    before its rank, its rank, and its index.

    Each rank has ``tiles`` tiles. Own tiles come first; the others follow in order of arrival.
    """
    before = number // tiles
    return before, (me + ranks - before) % ranks, number % tiles
