"""Tile shapes of GEMMs, and the schedule of tiles over blocks."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Tile shape and pipeline of a GEMM kernel.

    Attributes:
        M, N, K: extents of a tile, in elements.
        stages: depth of the pipeline that loads the operands.
        threads: threads of a block, without the producer that TileLang adds.
        group_m: rows of tiles that are computed together, column by column; see ``W.swizzle_2d``.
        num_chunks: chunks, from left to right, that copy engines transfer one by one: of a group
            of rows, or of the rows that are needed first.
    """

    M: int
    N: int
    K: int
    stages: int
    threads: int = 256
    group_m: int = 8
    num_chunks: int = 1

    def shared_bytes(self, itemsize: int) -> int:
        """Return the least shared memory of a block in bytes. The result reuses the memory of the
        operands."""
        operands = (self.M + self.N) * self.K * self.stages
        return max(operands, self.M * self.N) * itemsize

    def rows_at_once(self, nbytes: int) -> int:
        """Return the least number of rows of ``nbytes`` bytes that divide evenly into 16-byte
        vectors of all threads, the producer's included."""
        at_once = (self.threads + 128) * 16
        return at_once // gcd(at_once, nbytes)

    @property
    def width(self) -> int:
        """Columns of the result that a block of a persistent kernel stores at once.

        At most half a tile, and a power of two, which the TMA swizzles best. Each warp group has
        rows of these columns, so that TileLang keeps its barriers before and after each store.
        """
        return min(self.N & -self.N, self.N // 2)

    def has_whole_chunks(self, rows: int, columns: int) -> bool:
        """Return whether a product of this size divides into whole chunks of equally many tiles,
        whose partial sums are added in whole steps of K, see ``identity``."""
        is_whole = (
            ceil(rows / self.M) % self.group_m == 0
            and ceil(columns / self.N) % self.num_chunks == 0
        )
        return self.num_chunks == 1 or (is_whole and self.N % self.K == 0)

    def tiles_per_chunk(self, columns: int) -> int:
        """Return the number of tiles of a chunk of a whole group of rows."""
        return self.group_m * ceil(columns / self.N) // self.num_chunks

    def chunks(self, rows: int, columns: int) -> list[tuple[slice, slice]]:
        """Return the parts of a product that complete one after the other.

        ``has_whole_chunks`` must hold.
        """
        height, width = self.group_m * self.M, ceil(columns / self.N) // self.num_chunks * self.N
        return [
            (slice(low, min(low + height, rows)), slice(left, min(left + width, columns)))
            for low in range(0, rows, height)
            for left in range(0, columns, width)
        ]

    def widening(self, columns: int) -> list[slice]:
        """Return ``num_chunks`` slices along K in the order in which they arrive and are
        multiplied. The first is short, so that it arrives soon; each later one is as long as all
        before it together."""
        steps = ceil(columns / self.K)
        bounds = [steps >> shift for shift in range(self.num_chunks - 1, 0, -1)]
        return [slice(*pair) for pair in pairwise([0, *(b * self.K for b in bounds), columns])]

    def __str__(self) -> str:
        chunks = f", {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return (
            f"tiles of {self.M} x {self.N} x {self.K}, {self.stages} stages, {self.threads} "
            f"threads, bands of {self.group_m}{chunks}"
        )


@dataclass(frozen=True)
class Choice:
    """Program and tiles of a fused kernel.

    Attributes:
        program: one of the names in ``GemmOperator.programs``.
        tiles: tiles for which the program is instantiated.
    """

    program: str
    tiles: Tiles

    def __str__(self) -> str:
        return f"{self.program}, {self.tiles}"


@dataclass(frozen=True)
class PersistentSchedule:
    """Schedule of a persistent kernel: a block computes tile ``wave * blocks + block`` in each
    wave.

    It has the fewest blocks for its number of waves. Blocks differ by at most one tile. The
    operands of the next tile are loaded while the result of this one is stored. The result occupies
    at most half a tile of shared memory, so that four stages fit: a ring of three stages that
    continues from tile to tile costs 3 %, because TileLang computes its index modulo 3.

    Attributes:
        tiles, waves, blocks: number of each.
    """

    tiles: int
    waves: int
    blocks: int

    @staticmethod
    def for_tiles(tiles: int, sms: int | None = None) -> PersistentSchedule:
        """Return the schedule of fewest blocks that needs the fewest waves.

        Args:
            sms: most blocks; by default one SM stays free for a kernel that waits beside them.
        """
        waves = ceil(tiles / (sms or DEVICE.sm_count - 1))
        return PersistentSchedule(tiles, waves, ceil(tiles / waves))

    @staticmethod
    def with_blocks(tiles: int, blocks: int | None) -> PersistentSchedule:
        """Return a schedule of at most ``blocks`` blocks, or of one block per tile."""
        blocks = min(blocks or tiles, tiles)
        return PersistentSchedule(tiles, ceil(tiles / blocks), blocks)


def stores_last_peer(rows_per_rank: int, N: int, ranks: int, tiles: Tiles) -> bool:
    """Return whether a persistent kernel between copy engines stores the products for the last peer
    itself.

    It does if some of them are computed in the same wave as own tiles. Those wait for a peer's
    products, and a copy would begin only then.

    Args:
        rows_per_rank, N: rows and columns of the product for each rank.
    """
    tiles_per_rank = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    return (
        ranks > 1 and tiles_per_rank < PersistentSchedule.for_tiles(ranks * tiles_per_rank).blocks
    )


LARGE = Tiles(128, 256, 64, stages=3)
SMALL = Tiles(128, 128, 64, stages=6)
FEW_ROWS = (
    Tiles(64, 128, 128, stages=4, threads=128),
    Tiles(64, 64, 128, stages=6, threads=128),
    Tiles(128, 64, 64, stages=8),
)
"""Tiles for few rows, where reading the second operand dominates: many stages are in flight."""
FP8 = Tiles(128, 128, 128, stages=4)
"""fp8 tiles. A thread holds two accumulators, see ``accumulate``; those of a larger tile do not fit
into registers."""
STORE_TILES = (LARGE, SMALL, *FEW_ROWS)
"""Tiles of kernels with one block per tile that store over NVLink."""
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
"""Tiles that ``tw.tune`` measures, unless an operator overrides them."""
FP8_CANDIDATES = (
    FP8,
    Tiles(128, 128, 128, stages=6),
    Tiles(128, 128, 128, stages=4, group_m=4),
    Tiles(128, 128, 128, stages=4, group_m=16),
    Tiles(128, 192, 128, stages=4),
    Tiles(64, 128, 128, stages=6, threads=128),
)
"""``CANDIDATES`` for fp8."""
PERSISTENT_TILES = tuple(Tiles(128, columns, 64, stages=4) for columns in (256, 224, 192, 128))
"""Tiles of persistent kernels, whose result occupies at most half a tile of shared memory, see
``PersistentSchedule``."""
SHARED_BYTES = 227 << 10
"""Maximum shared memory of a block on sm_90, in bytes."""


def has_room_for_persistent_blocks() -> bool:
    """Return whether all blocks of a ``PersistentSchedule`` are resident at once on this rank's
    GPU, beside the block that waits for them. An H100 PCIe has too few SMs."""
    return sm_count() >= DEVICE.sm_count


def sm_count() -> int:
    """Return the number of SMs of this rank's GPU; without a GPU, that of ``DEVICE``."""
    global _sm_count
    if not _sm_count:
        has_gpu = torch.cuda.is_available()
        device = torch.cuda.get_device_properties() if has_gpu else None
        _sm_count = DEVICE.sm_count if device is None else device.multi_processor_count
    return _sm_count


def set_sm_count(count: int) -> None:
    """Let this process, which is no rank, compile for the GPU of one."""
    global _sm_count
    _sm_count = count


_sm_count = 0


def max_push_blocks() -> int:
    """Return the most blocks of a kernel that may store for other ranks before any of them
    continues. All must be resident at once, on sm_90 GPUs with fewer SMs too, and beside a kernel
    of NCCL."""
    return DEVICE.sm_count - 32 if has_room_for_persistent_blocks() else 64


def tiles_for(rows: int, columns: int, shards: int, itemsize: int = 2) -> Tiles:
    """Return large tiles if they fill the GPU once, else small ones; for fp8 always ``FP8``.

    Args:
        rows, columns: extents of one shard of the GEMM, in elements.
        shards: number of shards, whose rows no tile crosses.
        itemsize: bytes of an operand's element.
    """
    if itemsize == 1:
        return FP8
    large = shards * ceil(rows / LARGE.M) * ceil(columns / LARGE.N)
    return LARGE if large >= DEVICE.sm_count else SMALL


def persistent_tiles(itemsize: int) -> tuple[Tiles, ...]:
    """Return the tiles of persistent kernels for operands with elements of ``itemsize`` bytes."""
    return (FP8,) if itemsize == 1 else PERSISTENT_TILES


def store_tiles(itemsize: int) -> tuple[Tiles, ...]:
    """Return ``STORE_TILES`` for operands with elements of ``itemsize`` bytes."""
    return (FP8,) if itemsize == 1 else STORE_TILES
