"""Which tiles a GEMM is cut into: the one table."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil, gcd

import torch


@dataclass(frozen=True)
class DeviceSpec:
    """GPU for which the kernels choose their grids.

    Attributes:
        sm_count: streaming multiprocessors; each computes one tile at a time.
    """

    sm_count: int


DEVICE = DeviceSpec(sm_count=132)
"""H100 SXM and H200."""


@dataclass(frozen=True)
class Tiles:
    """How the blocks of a kernel multiply.

    Attributes:
        M, N, K: of one tile, in elements.
        stages: tiles of both operands in flight.
        threads: of a block, without the producer that TileLang adds.
        band: rows of tiles that are walked together, column by column; see ``W.swizzle_2d``.
        cut: pieces, from left to right, that copy engines bring one by one: of a band, or of the
            rows that are needed first.
    """

    M: int
    N: int
    K: int
    stages: int
    threads: int = 256
    group_m: int = 8
    num_chunks: int = 1

    def shared_bytes(self, itemsize: int) -> int:
        """What a block takes of shared memory at least: the result lies where the operands lay."""
        operands = (self.M + self.N) * self.K * self.stages
        return max(operands, self.M * self.N) * itemsize

    def rows_at_once(self, nbytes: int) -> int:
        """The least rows of so many bytes of which all threads, with those of the producer, have as
        many times 16 bytes each."""
        at_once = (self.threads + 128) * 16
        return at_once // gcd(at_once, nbytes)

    @property
    def width(self) -> int:
        """Columns of the result that a ``PersistentSchedule`` stores at a time: half of them at most, and a power
        of two, which the TMA swizzles best. All warp groups have rows of them, so that TileLang
        keeps its barriers before and behind each store."""
        return min(self.N & -self.N, self.N // 2)

    def cuts(self, rows: int, columns: int) -> bool:
        """Whether so many elements fall into whole pieces of equally many tiles, whose parts are
        added in whole steps, see ``identity``."""
        whole = (
            ceil(rows / self.M) % self.group_m == 0
            and ceil(columns / self.N) % self.num_chunks == 0
        )
        return self.num_chunks == 1 or (whole and self.N % self.K == 0)

    def tiles_per_chunk(self, columns: int) -> int:
        """Tiles of a piece of a whole band with so many elements in a row."""
        return self.group_m * ceil(columns / self.N) // self.num_chunks

    def pieces(self, rows: int, columns: int) -> list[tuple[slice, slice]]:
        """Parts that are complete at a time, of so many elements that are walked over and that
        ``cuts`` is true of."""
        height, width = self.group_m * self.M, ceil(columns / self.N) // self.num_chunks * self.N
        return [
            (slice(low, min(low + height, rows)), slice(left, min(left + width, columns)))
            for low in range(0, rows, height)
            for left in range(0, columns, width)
        ]

    def widening(self, columns: int) -> list[slice]:
        """``cut`` pieces of rows that are multiplied as they come: a short one, so that it comes
        soon, and then each as long as all before it together."""
        steps = ceil(columns / self.K)
        bounds = [steps >> left for left in range(self.num_chunks - 1, 0, -1)]
        return [slice(*pair) for pair in pairwise([0, *(b * self.K for b in bounds), columns])]

    def __str__(self) -> str:
        return (
            f"tiles of {self.M} x {self.N} x {self.K}, {self.stages} stages, {self.threads} "
            f"threads, bands of {self.group_m}{f', {self.num_chunks} pieces' if self.num_chunks > 1 else ''}"
        )


@dataclass(frozen=True)
class PersistentSchedule:
    """How blocks walk over tiles: tile ``turn * blocks + block`` in each turn.

    All walk over as many tiles, by as few blocks as can be. The operands of the next tile are
    loaded while the result of this one is stored. That has half a tile of shared memory at most, so
    that four stages fit: a ring of three, which goes on from tile to tile, costs 3 %, since
    TileLang computes its place modulo 3.

    Attributes:
        tiles, turns, blocks: how many.
    """

    tiles: int
    waves: int
    blocks: int

    @staticmethod
    def for_tiles(tiles: int, sms: int | None = None) -> PersistentSchedule:
        """
        Args:
            sms: that walk at most; by default one stays free, for what waits beside them.
        """
        waves = ceil(tiles / (sms or DEVICE.sm_count - 1))
        return PersistentSchedule(tiles, waves, ceil(tiles / waves))

    @staticmethod
    def with_blocks(tiles: int, blocks: int | None) -> PersistentSchedule:
        """So many blocks at most, or one for each tile."""
        blocks = min(blocks or tiles, tiles)
        return PersistentSchedule(tiles, ceil(tiles / blocks), blocks)


def stores_last_peer(rows_per_rank: int, N: int, ranks: int, tiles: Tiles) -> bool:
    """Whether a kernel that walks between copy engines stores the products for the peer that it
    serves last: some are made beside own tiles, which wait for such of a peer's, and a copy would
    only begin then.

    Args:
        share, N: rows and columns of what it computes for each of the ranks.
    """
    each = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    return ranks > 1 and each < PersistentSchedule.for_tiles(ranks * each).blocks


LARGE = Tiles(128, 256, 64, stages=3)
SMALL = Tiles(128, 128, 64, stages=6)
FEW_ROWS = (
    Tiles(64, 128, 128, stages=4, threads=128),
    Tiles(64, 64, 128, stages=6, threads=128),
    Tiles(128, 64, 64, stages=8),
)
"""Where reading the second operand takes longest: much of it is under way."""
FP8 = Tiles(128, 128, 128, stages=4)
"""Two sums of a tile are in registers, see ``accumulate``: those of a larger one do not fit."""
STORED = (LARGE, SMALL, *FEW_ROWS)
"""What one block computes each, and stores over NVLink."""
CANDIDATES = (
    LARGE,
    SMALL,
    Tiles(128, 256, 64, stages=4),
    Tiles(128, 256, 64, stages=4, group_m=4),
    Tiles(128, 256, 64, stages=3, group_m=4),
    Tiles(128, 256, 64, stages=3, group_m=16),
    Tiles(256, 128, 64, stages=3),
    Tiles(256, 128, 64, stages=4),
    Tiles(128, 192, 64, stages=4),
    Tiles(128, 128, 64, stages=4),
    Tiles(64, 256, 64, stages=4, threads=128),
    *FEW_ROWS,
)
"""What ``tw.tune`` tries unless an operator says otherwise."""
FP8_CANDIDATES = (
    FP8,
    Tiles(128, 128, 128, stages=6),
    Tiles(128, 128, 128, stages=4, group_m=4),
    Tiles(128, 128, 128, stages=4, group_m=16),
    Tiles(128, 192, 128, stages=4),
    Tiles(64, 128, 128, stages=6, threads=128),
)
"""The same for fp8."""
WALKED = tuple(Tiles(128, columns, 64, stages=4) for columns in (256, 224, 192, 128))
"""With half a tile of shared memory at most for the result, see ``PersistentSchedule``."""
SHARED_BYTES = 227 << 10
"""What a block may take of shared memory on sm_90."""


@cache
def has_room_for_walks() -> bool:
    """Whether all blocks of a ``PersistentSchedule`` run at a time on this rank's GPU, beside what waits for
    them: on an H100 PCIe they do not."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties().multi_processor_count >= DEVICE.sm_count


def blocks_that_push() -> int:
    """How many blocks of a kernel may store for other ranks before any of them goes on: all must
    run at a time, on GPUs of sm_90 with fewer SMs, too, and beside a kernel of NCCL."""
    return DEVICE.sm_count - 32 if has_room_for_walks() else 64


def tiles_for(rows: int, columns: int, shards: int, itemsize: int = 2) -> Tiles:
    """Large tiles where they fill the GPU once, else small ones; of fp8 always the same.

    Args:
        rows, columns: of what one shard of the GEMM computes, in elements.
        shards: of the GEMM, whose rows no tile crosses.
        itemsize: bytes of an operand's element.
    """
    if itemsize == 1:
        return FP8
    large = shards * ceil(rows / LARGE.M) * ceil(columns / LARGE.N)
    return LARGE if large >= DEVICE.sm_count else SMALL


def walked(itemsize: int) -> tuple[Tiles, ...]:
    """Tiles over which a ``PersistentSchedule`` goes, for operands with elements of so many bytes."""
    return (FP8,) if itemsize == 1 else WALKED


def stored(itemsize: int) -> tuple[Tiles, ...]:
    """``STORED``, for operands with elements of so many bytes."""
    return (FP8,) if itemsize == 1 else STORED
