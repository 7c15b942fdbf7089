"""Cost model of the operators: from its estimates the table chooses programs and tiles.

Times are in us, for H200s that are fully connected by NVLink. The costs of a copy, a flag and a
wait were measured separately. The rate of an SM and the constants of stores are fitted, so that the
totals match measured operators. tests/ops/gemm/test_cost_model.py states how close they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import numpy as np

from ...builtins.tile_order import swizzle_ranks
from ..core.tiles import DEVICE, PersistentSchedule, Tiles, store_tiles, stores_last_peer
from .kernels.comm_blocks import CommBlocks

_FLOPS_PER_US = 6.05e6
"""Floating-point operations on 16-bit operands of an SM per us, in tiles of 128 x 256; fp8 is
assumed twice as fast, which is not measured."""
_RELATIVE_TILE_TIME = {
    (128, 224, 4): 0.9, (128, 192, 4): 0.77, (128, 128, 4): 0.61, (128, 128, 6): 0.55,
    (128, 64, 8): 0.39, (64, 128, 4): 0.36, (64, 64, 6): 0.26,
}  # fmt: skip
"""Time of a tile relative to 128 x 256, by rows, columns and stages. Other tiles are proportional
to their size."""
_READ_BYTES_PER_US = 3.15e6
"""Bytes of the second operand that all SMs together read per us."""
_PADDING_COST = 0.35
"""Relative extra time of a tile without a single valid row; the TMA fills in the missing rows."""
_STORE_TILE_US = 2.0
"""Time to store the result of a tile, where it is not hidden."""
_KERNEL_BEGIN_US, _KERNEL_END_US = 3.0, 4.0
"""Time from the beginning of a call until its kernel computes the first tile, and from the end of
the last tile to the end of the kernel."""
_PUSH_BYTES_PER_US, _PULL_BYTES_PER_US = 360e3, 340e3
"""Bytes per us that a copy engine writes to a peer, or reads from one."""
_PUSH_ROW_PARTS_BYTES_PER_US = 200e3
"""``_PUSH_BYTES_PER_US`` for copies of parts of rows, whose memory is not contiguous."""
_FIRST_COPY_US = 12.0
"""Time from the beginning of a call to its first copy, which follows the kernel of the entry
barrier."""
_FLAG_COPY_US, _FLAG_OBSERVED_US = 2.0, 2.0
"""Time in which a copy engine writes a flag, and from then until the kernel that waits for the flag
continues."""
_LOW_GROUP_M, _LOW_GROUP_FACTOR = 8, 1.016
"""A group of fewer than ``_LOW_GROUP_M`` rows of tiles reuses less of the operands in L2: factor on
the time of its tiles."""
_NEXT_COPY_US, _NEXT_PEER_US = 3.0, 4.0
"""Extra time of a copy that follows another one to the same peer, or one to another peer."""
_COPY_AFTER_COPY_US, _COPY_AFTER_FLAG_US = 6.0, 7.0
"""Time until a copy that waits for flags begins: after the end of the previous copy, and after the
last flag is written. The later time applies."""
_JOIN_US = 11.0
"""Time from the end of the last copy to the end of the call, which joins both streams."""
_CHUNK_US, _PARTIAL_WAVE_US = 4.0, 8.0
"""Extra time of the kernel for each chunk after the first, and if a chunk has fewer tiles than a
wave."""
_LAST_SIGNAL_US, _SM_PULL_BYTES_PER_US = 8.0, 340e3
"""Time until blocks may pull the last tiles from peers, and bytes per us that all blocks together
pull."""
_NVLINK_STORE_FACTOR = 1.1
"""Factor on the time of tiles whose results are stored over NVLink."""
_STORE_TAIL_US, _MIN_STORE_TAIL_US = 33.0, 6.0
"""Time from the end of the last tile of 128 x 256 until it is stored, has arrived, and is added.
That of other tiles is proportional to their size, but at least ``_MIN_STORE_TAIL_US``."""
_PUBLISH_US = 4.0
"""Time until all ranks may read what each rank has stored."""
_FIRST_SUMS_US, _SUMS_BYTES_PER_US = 5.0, 385e3
"""Time until the first sums arrive from their owners, and bytes per us of sums that arrive."""
_SM_PUSH_BYTES_PER_US, _SM_PUSH_BLOCKS = 150e3, 100
"""Bytes per us that the blocks of a kernel together store at peers before they multiply, and the
number of blocks that this rate needs; fewer blocks store proportionally less."""
_BLOCK_PUSH_BYTES_PER_US = 15e3
"""Bytes per us that a block stores if it does nothing else."""
_CUBLAS_EXTRA_US = 2.0
"""Extra time of a GEMM of cuBLAS over the estimate for the best of the ``store_tiles``."""
_NCCL_SMALL, _NCCL_LARGE = (7.0, 10e-6), (26.0, 3e-6)
"""Latency of a collective of NCCL, and its time per byte that a rank receives, for small and for
large messages. The smaller of both times applies."""

UNFUSED_HOST_US = 40.0
"""Least time between two calls of a collective of NCCL and cuBLAS that no CUDA graph captures: the
host needs it (benchmarks/host_time.py, 2026-11-30: 45 to 83 us, a fused call 19 to 33 us)."""


def estimate_tile_us(tiles: Tiles, K: int, itemsize: int) -> float:
    """Estimate one tile on one SM."""
    by_size = tiles.M * tiles.N / (128 * 256)
    relative = _RELATIVE_TILE_TIME.get((tiles.M, tiles.N, tiles.stages), by_size)
    return relative * 2 * 128 * 256 * K / (_FLOPS_PER_US * 2 / itemsize) + _STORE_TILE_US


@lru_cache(maxsize=256)
def estimate_ag_gemm_copy_engine_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """Estimate ``ag_gemm_copy_engine`` with the copies of what it multiplies.

    Args:
        rows_per_rank, N, K, ranks, tiles: arguments of the program.
        itemsize: bytes of an operand's element.
    """
    tile_us = estimate_tile_us(tiles, K, itemsize) * _padding_factor(rows_per_rank, tiles)
    tiles_per_rank = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    schedule = PersistentSchedule.for_tiles(ranks * tiles_per_rank, DEVICE.sm_count)
    # Earliest end of the tiles of a peer's rows, given their arrival.
    arrival = np.zeros(ranks)
    sent_us, column_bytes = _FIRST_COPY_US - _NEXT_PEER_US, rows_per_rank * itemsize
    for peer in range(1, ranks):
        chunks, rate = [slice(0, K)], _PUSH_BYTES_PER_US
        if peer == 1 and tiles.num_chunks > 1:
            chunks, rate = tiles.widening(K), _PUSH_ROW_PARTS_BYTES_PER_US
        sent_us += _NEXT_PEER_US - _NEXT_COPY_US
        for k in chunks:
            sent_us += _NEXT_COPY_US + column_bytes * (k.stop - k.start) / rate + _FLAG_COPY_US
            arrival[peer] = max(
                arrival[peer], sent_us + _FLAG_OBSERVED_US + tile_us * (1 - k.start / K)
            )
    # If no SM stays free for the entry barrier, the kernel begins after it.
    ends = np.full(
        schedule.blocks, _FIRST_COPY_US if schedule.blocks == DEVICE.sm_count else _KERNEL_BEGIN_US
    )
    for numbers in _waves(schedule):
        wave_ends = ends[: len(numbers)]
        wave_ends[:] = np.maximum(wave_ends + tile_us, arrival[numbers // tiles_per_rank])
    return float(ends.max()) + _KERNEL_END_US


@lru_cache(maxsize=256)
def estimate_ag_gemm_comm_blocks_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """Estimate ``ag_gemm_comm_blocks``, whose first blocks store own rows at the other ranks.

    Args:
        rows_per_rank, N, K, ranks, tiles: arguments of the program.
        itemsize: bytes of an operand's element.
    """
    tile_us = estimate_tile_us(tiles, K, itemsize) * _padding_factor(rows_per_rank, tiles)
    tiles_per_rank = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    senders = CommBlocks.dedicated(rows_per_rank, N, K, ranks, tiles, itemsize)
    strip_bytes = senders.height * senders.width * itemsize
    strip_us = max(
        strip_bytes / _BLOCK_PUSH_BYTES_PER_US, senders.blocks * strip_bytes / _PULL_BYTES_PER_US
    )
    # Arrival of each chunk from all ranks; only tiles of other ranks' rows wait for it.
    num_strips = np.arange(1, senders.num_chunks + 1) * senders.strips_per_chunk * (ranks - 1)
    arrival = (
        _KERNEL_BEGIN_US
        + np.ceil(num_strips / max(senders.blocks, 1)) * strip_us
        + _FLAG_OBSERVED_US
    )
    ends = np.full(senders.schedule.blocks, _KERNEL_BEGIN_US)
    for numbers in _waves(senders.schedule):
        wave_ends = ends[: len(numbers)]
        own, remote = np.split(wave_ends, [max(0, tiles_per_rank - numbers[0])])
        own += tile_us
        for chunk in arrival if len(remote) else ():
            remote[:] = np.maximum(remote, chunk) + tile_us / senders.num_chunks
    return float(ends.max()) + _KERNEL_END_US


@lru_cache(maxsize=256)
def estimate_gemm_rs_persistent_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2,
    out_itemsize: int = 2, shared: bool = False,
) -> float:  # fmt: skip
    """Estimate ``gemm_rs_persistent`` with the copies of its products.

    If every rank receives all sums (``shared``), copy engines transfer them too, except the last
    chunk, which the blocks of the kernel pull from peers.

    Args:
        rows_per_rank, N, K, ranks, tiles: arguments of the program.
        itemsize, out_itemsize: bytes of an element of the operands and of the result.
    """
    tile_us = estimate_tile_us(tiles, K, itemsize) * _padding_factor(rows_per_rank, tiles)
    if tiles.group_m < _LOW_GROUP_M:
        tile_us *= _LOW_GROUP_FACTOR
    adding_us = ceil(tiles.N / tiles.K) / ceil(K / tiles.K) * tile_us
    tiles_per_rank = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    tiles_per_chunk = tiles.tiles_per_chunk(N)
    schedule = PersistentSchedule.for_tiles(ranks * tiles_per_rank)
    extents = [
        (rows.stop - rows.start, columns.stop - columns.start)
        for rows, columns in tiles.chunks(rows_per_rank, N)
    ]
    nbytes = [height * width * out_itemsize for height, width in extents]
    copies = Copies(
        nbytes,
        [ceil(height / tiles.M) * ceil(width / tiles.N) for height, width in extents],
        ranks, shared, stores_last_peer(rows_per_rank, N, ranks, tiles),
    )  # fmt: skip
    ends = np.full(schedule.blocks, _KERNEL_BEGIN_US)
    for numbers in _waves(schedule):
        wave_ends = ends[: len(numbers)]
        owners, places = swizzle_ranks(
            numbers, tiles_per_rank, 0, ranks, tiles_per_chunk if shared else None
        )
        chunks = places // tiles_per_chunk
        wave_ends += tile_us
        is_remote = owners > 0
        copies.finish(owners[is_remote], chunks[is_remote], wave_ends[is_remote])
        for chunk in dict.fromkeys(chunks[~is_remote].tolist()):
            is_own = ~is_remote & (chunks == chunk)
            for arrival in copies.arrivals(chunk):
                wave_ends[is_own] = np.maximum(wave_ends[is_own], arrival) + adding_us
            copies.finish(owners[is_own], chunks[is_own], wave_ends[is_own])
    end = float(ends.max()) + _KERNEL_END_US
    if shared and ranks > 1:
        end += _CHUNK_US * (len(extents) - 1) + _PARTIAL_WAVE_US * (
            tiles_per_chunk < schedule.blocks
        )
        end += _LAST_SIGNAL_US + (ranks - 1) * nbytes[-1] / _SM_PULL_BYTES_PER_US
    return max(end, copies.end + _JOIN_US * (len(extents) > 1) * shared)


def estimate_gemm_rs_store_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """Estimate ``gemm_rs_store``, whose tiles are stored over NVLink."""
    tail = max(_STORE_TAIL_US * tiles.M * tiles.N / (128 * 256), _MIN_STORE_TAIL_US)
    rows = ranks * ceil(rows_per_rank / tiles.M) * tiles.M
    return (
        estimate_product_us(rows, N, K, tiles, itemsize)
        * _padding_factor(rows_per_rank, tiles)
        * _NVLINK_STORE_FACTOR
        + tail
    )


def estimate_two_shot_us(
    M: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2, out_itemsize: int = 2
) -> float:
    """Estimate ``gemm_ar_two_shot``: tiles are stored over NVLink, and so are their sums."""
    sums = M * N * out_itemsize * (ranks - 1) / ranks
    return (
        estimate_gemm_rs_store_us(M, N, K, 1, tiles, itemsize)
        + _FIRST_SUMS_US
        + sums / _SUMS_BYTES_PER_US
    )


def estimate_one_shot_us(
    M: int, N: int, K: int, tiles: Tiles, pulled: float, itemsize: int = 2
) -> float:
    """Estimate a one-shot program, in which each rank reads ``pulled`` bytes of products from the
    others."""
    product = estimate_product_us(M, N, K, tiles, itemsize) * _padding_factor(M, tiles)
    return (
        _KERNEL_BEGIN_US + product + (_PUBLISH_US + pulled / _PULL_BYTES_PER_US if pulled else 0.0)
    )


def estimate_ag_gemm_push_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """Estimate ``ag_gemm_push``."""
    nbytes, M = (ranks - 1) * rows_per_rank * K * itemsize, ranks * rows_per_rank
    product = estimate_product_us(M, N, K, tiles, itemsize) * _padding_factor(M, tiles)
    num_blocks = ceil(M / tiles.M) * ceil(N / tiles.N)
    rate = _SM_PUSH_BYTES_PER_US * min(1, num_blocks / _SM_PUSH_BLOCKS)
    return _KERNEL_BEGIN_US + (_PUBLISH_US + nbytes / rate if nbytes else 0.0) + product


def _padding_factor(M: int, tiles: Tiles) -> float:
    """Return the factor on the time of tiles because some of their rows are padding."""
    return 1 + _PADDING_COST * (1 - M / (ceil(M / tiles.M) * tiles.M))


def estimate_product_us(M: int, N: int, K: int, tiles: Tiles, itemsize: int = 2) -> float:
    """Estimate a kernel with one block per tile, without communication."""
    waves = ceil(ceil(M / tiles.M) * ceil(N / tiles.N) / DEVICE.sm_count)
    return max(waves * estimate_tile_us(tiles, K, itemsize), N * K * itemsize / _READ_BYTES_PER_US)


def estimate_unfused_us(M: int, N: int, K: int, nbytes: float, itemsize: int = 2) -> float:
    """Estimate cuBLAS and NCCL in sequence.

    Args:
        M, N, K: extents of one rank's product.
        nbytes: bytes that each rank receives; 0 if there is one rank.
    """
    product = _CUBLAS_EXTRA_US + min(
        estimate_product_us(M, N, K, tiles, itemsize) for tiles in store_tiles(itemsize)
    )
    exchange = min(latency + per_byte * nbytes for latency, per_byte in (_NCCL_SMALL, _NCCL_LARGE))
    return product + (exchange if nbytes else 0.0)


def _waves(schedule: PersistentSchedule) -> Iterator[np.ndarray]:
    """Yield the tile indices of each wave."""
    for wave in range(schedule.waves):
        yield np.arange(wave * schedule.blocks, min((wave + 1) * schedule.blocks, schedule.tiles))


class Copies:
    """Simulated copies of one rank while its kernel computes. All ranks behave the same.

    Args:
        nbytes: bytes of each chunk of an owner.
        tiles: number of tiles of each chunk.
        shared: whether copy engines also pull the peers' sums, except those of the last chunk.
        stores_last_peer: whether the kernel stores the products for the last peer itself.
    """

    def __init__(
        self,
        nbytes: list[float],
        tiles: list[int],
        ranks: int,
        shared: bool,
        stores_last_peer: bool,
    ) -> None:
        self._nbytes, self._ranks, self._stores_last_peer = nbytes, ranks, stores_last_peer
        chunks, peers = range(len(nbytes)), range(1, ranks - stores_last_peer)
        self._left = {(owner, chunk): tiles[chunk] for owner in range(ranks) for chunk in chunks}
        self._ready = dict.fromkeys(self._left, 0.0)
        self._arrived: dict[int, list[float]] = {chunk: [] for chunk in chunks}
        self._next: deque[tuple[int, int]] = deque()
        """Pending copies as (owner, chunk), in the order of the plan; owner 0 is this rank."""
        if not shared:
            self._next.extend((peer, chunk) for peer in peers for chunk in chunks)
        elif ranks > 1:
            for chunk in chunks:
                self._next.extend((peer, chunk) for peer in peers)
                if chunk:
                    self._next.append((0, chunk - 1))
        self.end = _FIRST_COPY_US - _COPY_AFTER_COPY_US
        """Time at which all copies that could begin so far are complete."""

    def finish(self, owners: np.ndarray, chunks: np.ndarray, ends: np.ndarray) -> None:
        """Record computed tiles; start the copies that they complete."""
        if not len(ends):
            return
        codes = owners * len(self._nbytes) + chunks
        begins = np.flatnonzero(codes[1:] != codes[:-1]) + 1
        first = np.concatenate(([0], begins))
        counts = np.concatenate((begins, [len(codes)])) - first
        latest = np.maximum.reduceat(ends, first)
        columns = (a.tolist() for a in (owners[first], chunks[first], counts, latest))
        for owner, chunk, count, end in zip(*columns, strict=True):
            self._left[owner, chunk] -= count
            self._ready[owner, chunk] = max(self._ready[owner, chunk], end)
            if self._stores_last_peer and owner == self._ranks - 1 and not self._left[owner, chunk]:
                stored = self._ready[owner, chunk] + self._nbytes[chunk] / _PUSH_BYTES_PER_US
                self._arrived[chunk].append(stored + _FLAG_OBSERVED_US)
        while self._next and not self._left[self._next[0]]:
            self._copy(*self._next.popleft())

    def _copy(self, owner: int, chunk: int) -> None:
        nbytes = self._nbytes[chunk]
        begins = max(
            self.end + _COPY_AFTER_COPY_US, self._ready[owner, chunk] + _COPY_AFTER_FLAG_US
        )
        if owner:
            self.end = begins + nbytes / _PUSH_BYTES_PER_US + _FLAG_COPY_US
            self._arrived[chunk].append(self.end + _FLAG_OBSERVED_US)
        else:
            peers = self._ranks - 1
            self.end = (
                begins + peers * (nbytes / _PULL_BYTES_PER_US + _NEXT_COPY_US) - _NEXT_COPY_US
            )

    def arrivals(self, chunk: int) -> list[float]:
        """Return when the others' products for an own chunk arrive. All of them must be
        computed."""
        arrived = self._arrived[chunk]
        assert len(arrived) == self._ranks - 1
        return sorted(arrived)
