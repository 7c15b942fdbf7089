"""How long an operator takes, foretold: from this the table picks programs, tiles and bands.

In us, of H200s all of which reach each other by NVLink. What a copy, a flag and a wait take was
measured for itself; the rate of an SM and the constants of stores are chosen so that the whole is
what operators took. tests/ops/autotune/test_cost_model.py says how near that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from math import ceil

import numpy as np

from ...builtins.tile_order import swizzle_ranks
from ..core.tiles import DEVICE, PersistentSchedule, Tiles, stored, stores_last_peer
from ..gemm.comm_blocks import CommBlocks

_RATE = 6.05e6
"""Floating-point operations of 16-bit operands that an SM does in a us, in tiles of 128 x 256; of
fp8 twice as many, which is not measured."""
_RELATIVE = {
    (128, 224, 4): 0.9, (128, 192, 4): 0.77, (128, 128, 4): 0.61, (128, 128, 6): 0.55,
    (128, 64, 8): 0.39, (64, 128, 4): 0.36, (64, 64, 6): 0.26,
}  # fmt: skip
"""How long a tile takes, by rows, columns and stages, compared with 128 x 256; others in
proportion to their size."""
_READ = 3.15e6
"""Bytes of the second operand that all SMs read in a us."""
_EMPTY = 0.35
"""How much longer tiles take without a row; the TMA fills in what there is not."""
_RESULT = 2.0
"""Until the result of a tile has left, where that is not hidden."""
_BEGIN, _END = 3.0, 4.0
"""Until a kernel's first tile begins, and from the end of its last one to that of the kernel."""
_PUSHED, _FETCHED = 360e3, 340e3
"""Bytes that a copy engine sends to a peer, or gets from one, in a us."""
_PUSHED_ROWS = 200e3
"""Of parts of rows."""
_MEETING = 12.0
"""From the beginning of a call until the first copy, behind the kernel in which ranks meet."""
_FLAG, _SEEN = 2.0, 2.0
"""Copying a flag, and until who waits for it goes on."""
_LOW, _OF_LOW = 8, 1.016
"""Below so many rows of tiles, a band shares less of the operands in L2: how much longer tiles
take."""
_FURTHER, _PEER = 3.0, 4.0
"""Until a copy behind another one, and what it takes longer to another peer."""
_BEHIND_COPY, _BEHIND_WORD = 6.0, 7.0
"""From a copy, or the writing of a word, until a copy behind a wait for words."""
_JOINED = 11.0
"""From the last copy to the end of the call."""
_PIECE, _SHORT_OF_A_TURN = 4.0, 8.0
"""How much longer the kernel takes for each piece behind the first, and if these are computed in
less than a turn of all blocks."""
_TOLD, _FETCHED_BY_SMS = 8.0, 340e3
"""Until blocks fetch what the last tiles have become, and bytes that all of them get in a us."""
_STORING = 1.1
"""How much longer tiles take whose results are stored over NVLink."""
_STORED, _AT_LEAST = 33.0, 6.0
"""From the last tile of 128 x 256 until it is stored, has come, and is added; of others in
proportion, but for the least."""
_PUBLISHED = 4.0
"""Until all ranks may read what each has stored."""
_SPREAD, _SPREADING = 5.0, 385e3
"""Until sums have come from where they were added up, and bytes of which it is so much longer by
each us."""
_PUSHED_BY_SMS = 150e3, 100
"""Bytes that so many blocks send in a us before they multiply; fewer in proportion."""
_PUSHED_BY_ONE = 15e3
"""Bytes that a block sends in a us which does nothing else."""
_CUBLAS = 2.0
"""What cuBLAS takes longer than the best tiles."""
_SHORT, _LONG = (7.0, 10e-6), (26.0, 3e-6)
"""What NCCL takes, and how much longer for each byte that a rank gets: the lesser of two."""


def estimate_tile_us(tiles: Tiles, K: int, itemsize: int) -> float:
    """One SM, one tile."""
    of_size = tiles.M * tiles.N / (128 * 256)
    relative = _RELATIVE.get((tiles.M, tiles.N, tiles.stages), of_size)
    return relative * 2 * 128 * 256 * K / (_RATE * 2 / itemsize) + _RESULT


@lru_cache(maxsize=256)
def estimate_ag_gemm_copy_engine_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """``ag_gemm_copy_engine`` between copy engines that bring what it multiplies.

    Args:
        rows_per_rank, N, K, ranks, tiles: as for the program.
        itemsize: bytes of an operand's element.
    """
    each = estimate_tile_us(tiles, K, itemsize) * _filled(rows_per_rank, tiles)
    of_rank = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    walk = PersistentSchedule.for_tiles(ranks * of_rank, DEVICE.sm_count)
    # When tiles of a peer's rows are done that nothing else holds up.
    comes = np.zeros(ranks)
    sent, column = _MEETING - _PEER, rows_per_rank * itemsize
    for peer in range(1, ranks):
        pieces, rate = [slice(0, K)], _PUSHED
        if peer == 1 and tiles.num_chunks > 1:
            pieces, rate = tiles.widening(K), _PUSHED_ROWS
        sent += _PEER - _FURTHER
        for k in pieces:
            sent += _FURTHER + column * (k.stop - k.start) / rate + _FLAG
            comes[peer] = max(comes[peer], sent + _SEEN + each * (1 - k.start / K))
    # Where no SM stays free for it, the kernel begins behind the meeting.
    ends = np.full(walk.blocks, _MEETING if walk.blocks == DEVICE.sm_count else _BEGIN)
    for numbers in _waves(walk):
        of_turn = ends[: len(numbers)]
        of_turn[:] = np.maximum(of_turn + each, comes[numbers // of_rank])
    return float(ends.max()) + _END


@lru_cache(maxsize=256)
def estimate_ag_gemm_comm_blocks_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """``communicated_matmul``, whose first blocks send own rows.

    Args:
        rows_per_rank, N, K, ranks, tiles: as for the program.
        itemsize: bytes of an operand's element.
    """
    each = estimate_tile_us(tiles, K, itemsize) * _filled(rows_per_rank, tiles)
    of_rank = ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N)
    sent = CommBlocks.apart(rows_per_rank, N, K, ranks, tiles, itemsize)
    strip = sent.height * sent.width * itemsize
    strip_us = max(strip / _PUSHED_BY_ONE, sent.blocks * strip / _FETCHED)
    # When a piece of all ranks is there, tile after tile of those that are not own ones.
    done = np.arange(1, sent.pieces + 1) * sent.strips_per_piece * (ranks - 1)
    comes = _BEGIN + np.ceil(done / max(sent.blocks, 1)) * strip_us + _SEEN
    ends = np.full(sent.walk.blocks, _BEGIN)
    for numbers in _waves(sent.walk):
        of_turn = ends[: len(numbers)]
        others = numbers >= of_rank
        for piece in comes:
            of_turn[others] = np.maximum(of_turn[others], piece) + each / sent.pieces
        of_turn[~others] += each
    return float(ends.max()) + _END


@lru_cache(maxsize=256)
def estimate_gemm_rs_persistent_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2,
    out_itemsize: int = 2, shared: bool = False,
) -> float:  # fmt: skip
    """``gemm_rs_persistent`` between copy engines that bring products, and, if its sums are ``shared``,
    these, too, but for the last piece, which its blocks fetch.

    Args:
        rows_per_rank, N, K, ranks, tiles: as for the program.
        itemsize, out_itemsize: bytes of an element of the operands, and of the result.
    """
    each = estimate_tile_us(tiles, K, itemsize) * _filled(rows_per_rank, tiles)
    if tiles.group_m < _LOW:
        each *= _OF_LOW
    adding = ceil(tiles.N / tiles.K) / ceil(K / tiles.K) * each
    of_rank, tiles_per_chunk = (
        ceil(rows_per_rank / tiles.M) * ceil(N / tiles.N),
        tiles.tiles_per_chunk(N),
    )
    walk = PersistentSchedule.for_tiles(ranks * of_rank)
    extents = [
        (rows.stop - rows.start, columns.stop - columns.start)
        for rows, columns in tiles.pieces(rows_per_rank, N)
    ]
    nbytes = [height * width * out_itemsize for height, width in extents]
    copies = Copies(
        nbytes,
        [ceil(height / tiles.M) * ceil(width / tiles.N) for height, width in extents],
        ranks, shared, stores_last_peer(rows_per_rank, N, ranks, tiles),
    )  # fmt: skip
    ends = np.full(walk.blocks, _BEGIN)
    for numbers in _waves(walk):
        of_turn = ends[: len(numbers)]
        owners, places = swizzle_ranks(
            numbers, of_rank, 0, ranks, tiles_per_chunk if shared else None
        )
        pieces = places // tiles_per_chunk
        of_turn += each
        others = owners > 0
        copies.made(owners[others], pieces[others], of_turn[others])
        for piece in np.unique(pieces[~others]):
            own = ~others & (pieces == piece)
            for arrival in copies.arrivals(piece):
                of_turn[own] = np.maximum(of_turn[own], arrival) + adding
            copies.made(owners[own], pieces[own], of_turn[own])
    end = float(ends.max()) + _END
    if shared and ranks > 1:
        end += _PIECE * (len(extents) - 1) + _SHORT_OF_A_TURN * (tiles_per_chunk < walk.blocks)
        end += _TOLD + (ranks - 1) * nbytes[-1] / _FETCHED_BY_SMS
    return max(end, copies.end + _JOINED * (len(extents) > 1) * shared)


def estimate_gemm_rs_store_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """``matmul_reduce_scatter_program``, whose tiles are stored over NVLink."""
    last = max(_STORED * tiles.M * tiles.N / (128 * 256), _AT_LEAST)
    rows = ranks * ceil(rows_per_rank / tiles.M) * tiles.M
    return (
        estimate_product_us(rows, N, K, tiles, itemsize) * _filled(rows_per_rank, tiles) * _STORING
        + last
    )


def estimate_two_shot_us(
    M: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2, out_itemsize: int = 2
) -> float:
    """``two_shot_program``: the same, and sums are stored, too."""
    sums = M * N * out_itemsize * (ranks - 1) / ranks
    return estimate_gemm_rs_store_us(M, N, K, 1, tiles, itemsize) + _SPREAD + sums / _SPREADING


def estimate_one_shot_us(
    M: int, N: int, K: int, tiles: Tiles, fetched: float, itemsize: int = 2
) -> float:
    """A program whose ranks fetch so many bytes of what the others have computed."""
    product = estimate_product_us(M, N, K, tiles, itemsize) * _filled(M, tiles)
    return _BEGIN + product + (_PUBLISHED + fetched / _FETCHED if fetched else 0.0)


def estimate_ag_gemm_push_us(
    rows_per_rank: int, N: int, K: int, ranks: int, tiles: Tiles, itemsize: int = 2
) -> float:
    """``ag_gemm_push``."""
    sent, M = (ranks - 1) * rows_per_rank * K * itemsize, ranks * rows_per_rank
    product = estimate_product_us(M, N, K, tiles, itemsize) * _filled(M, tiles)
    rate, blocks = _PUSHED_BY_SMS
    rate *= min(1, ceil(M / tiles.M) * ceil(N / tiles.N) / blocks)
    return _BEGIN + (_PUBLISHED + sent / rate if sent else 0.0) + product


def _filled(M: int, tiles: Tiles) -> float:
    """How much longer tiles take of which not all rows are there."""
    return 1 + _EMPTY * (1 - M / (ceil(M / tiles.M) * tiles.M))


def estimate_product_us(M: int, N: int, K: int, tiles: Tiles, itemsize: int = 2) -> float:
    """A kernel with a block for each tile, alone."""
    waves = ceil(ceil(M / tiles.M) * ceil(N / tiles.N) / DEVICE.sm_count)
    return max(waves * estimate_tile_us(tiles, K, itemsize), N * K * itemsize / _READ)


def estimate_unfused_us(M: int, N: int, K: int, moved: float, itemsize: int = 2) -> float:
    """cuBLAS and NCCL, one after the other.

    Args:
        M, N, K: of what one rank multiplies.
        moved: bytes that each rank gets; 0 if there is one rank.
    """
    product = _CUBLAS + min(
        estimate_product_us(M, N, K, tiles, itemsize) for tiles in stored(itemsize)
    )
    exchange = min(begin + each * moved for begin, each in (_SHORT, _LONG))
    return product + (exchange if moved else 0.0)


def _waves(walk: PersistentSchedule) -> Iterator[np.ndarray]:
    """The numbers of the tiles of each turn."""
    for turn in range(walk.waves):
        yield np.arange(turn * walk.blocks, min((turn + 1) * walk.blocks, walk.tiles))


class Copies:
    """What copy engines bring while a kernel computes it, on one rank; on the others it is alike.

    Args:
        nbytes: of each piece of an owner.
        tiles: how many each of them has.
        shared: whether sums are brought, too, but for the last piece: an own piece then goes to all
            peers, from which this rank gets theirs meanwhile.
        stores_last_peer: whether the kernel stores what is for the last peer.
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
        pieces, peers = range(len(nbytes)), range(1, ranks - stores_last_peer)
        self._left = {(owner, piece): tiles[piece] for owner in range(ranks) for piece in pieces}
        self._ready = dict.fromkeys(self._left, 0.0)
        self._arrived: dict[int, list[float]] = {piece: [] for piece in pieces}
        self._next: deque[tuple[int, int]] = deque()
        """(owner, piece), in the order of the plan; own pieces are owner 0's."""
        if not shared:
            self._next.extend((peer, piece) for peer in peers for piece in pieces)
        elif ranks > 1:
            for sent in pieces:
                self._next.extend((peer, sent) for peer in peers)
                if sent:
                    self._next.append((0, sent - 1))
        self.end = _MEETING - _BEHIND_COPY
        """When all is brought that could be so far."""

    def made(self, owners: np.ndarray, pieces: np.ndarray, ends: np.ndarray) -> None:
        """Tiles are there."""
        for owner, piece in np.unique(np.stack([owners, pieces]), axis=1).T.tolist():
            these = ends[(owners == owner) & (pieces == piece)]
            self._left[owner, piece] -= len(these)
            self._ready[owner, piece] = max(self._ready[owner, piece], float(these.max()))
            if self._stores_last_peer and owner == self._ranks - 1 and not self._left[owner, piece]:
                stored = self._ready[owner, piece] + self._nbytes[piece] / _PUSHED
                self._arrived[piece].append(stored + _SEEN)
        while self._next and not self._left[self._next[0]]:
            self._copy(*self._next.popleft())

    def _copy(self, owner: int, piece: int) -> None:
        nbytes = self._nbytes[piece]
        begins = max(self.end + _BEHIND_COPY, self._ready[owner, piece] + _BEHIND_WORD)
        if owner:
            self.end = begins + nbytes / _PUSHED + _FLAG
            self._arrived[piece].append(self.end + _SEEN)
        else:
            peers = self._ranks - 1
            self.end = begins + peers * (nbytes / _FETCHED + _FURTHER) - _FURTHER

    def arrivals(self, piece: int) -> list[float]:
        """When others' products for an own piece are there, all of which they have made."""
        arrived = self._arrived[piece]
        assert len(arrived) == self._ranks - 1
        return sorted(arrived)
