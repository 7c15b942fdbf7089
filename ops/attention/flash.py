"""Tiles of flash attention: their sizes, their number, and the queries and keys of each."""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch

from .problem import AttentionProblem


@dataclass(frozen=True)
class FlashTiles:
    """Tile sizes of a block.

    Attributes:
        M, N: queries and keys of a tile.
        stages: tiles of keys and values in flight.
        threads: threads of a block without the producer that TileLang adds: 128 for each 64
            queries.
    """

    M: int
    N: int
    stages: int
    threads: int

    def __str__(self) -> str:
        return f"tiles of {self.M} x {self.N}, {self.stages} stages, {self.threads} threads"


class PackedTile(NamedTuple):
    """Queries of one of several packed sequences, and the keys that they see.

    Attributes:
        row, valid: index of the first query among the rank's queries, and number of queries, at
            most those of one tile.
        begin: number of keys that the first query sees.
        k_row: index of the sequence's first key among the keys of each owner.
        chunk: keys of a chunk of the sequence.
    """

    row: Any
    valid: Any
    begin: Any
    k_row: Any
    chunk: Any


def packed_tiles(
    problem: AttentionProblem, tiles: FlashTiles, rank: int, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> torch.Tensor:
    """Return a rank's tiles, ``max_tiles`` rows of ``PackedTile``.

    Tiles that see the most keys come first. Unused rows have no queries and come last. The host
    does not wait.
    """
    parts, sharding = problem.sharding.parts, problem.sharding
    q_lengths, k_lengths = cu_q.diff(), cu_k.diff()
    rows = (q_lengths // sharding.chunks).repeat_interleave(parts)
    counts = (rows + tiles.M - 1) // tiles.M
    ends = counts.cumsum(0)
    number = torch.arange(max_tiles(problem, tiles), device=cu_q.device)
    piece = torch.searchsorted(ends, number, right=True)
    used = piece < len(ends)
    piece = piece.clamp(max=len(ends) - 1)
    sequence, part = piece // parts, piece % parts
    first = (number - ends[piece] + counts[piece]) * tiles.M
    prefix = k_lengths[sequence] - q_lengths[sequence]
    tile = PackedTile(
        row=cu_q[sequence] // problem.ranks + part * rows[piece] + first,
        valid=(rows[piece] - first).clamp(0, tiles.M) * used,
        begin=sharding.chunk_of(part, rank) * rows[piece] + first + prefix + 1,
        k_row=cu_k[sequence] // problem.ranks,
        chunk=k_lengths[sequence] // (problem.ranks * (parts if problem.causal else 1)),
    )
    work = (tile.begin if problem.causal else k_lengths[sequence]) * used
    return torch.stack(tile, 1)[work.argsort(descending=True)].int()


def max_tiles(problem: AttentionProblem, tiles: FlashTiles) -> int:
    """Return the number of tiles of queries of a rank for each head; if packed, an upper bound."""
    parts = problem.sharding.parts
    if problem.packed:
        return problem.q_rows // tiles.M + problem.batch * parts
    return parts * ceil(problem.q_rows // parts / tiles.M)


def key_chunk(problem: AttentionProblem) -> int:
    """Return the rows of a chunk of keys; the average if sequences are packed."""
    sequences = problem.batch if problem.packed else 1
    return problem.k_rows // sequences // (problem.sharding.parts if problem.causal else 1)


_KEY_TILES = ((128, 1.0), (112, 0.96), (96, 0.81))
"""Keys of a tile, and its time relative to the first one on an H200 (benchmarks/LOG.md)."""


def tiles_for(problem: AttentionProblem) -> FlashTiles:
    """Return the tiles with which a chunk of keys needs the least time."""
    sequences = problem.batch if problem.packed else 1
    queries = problem.q_rows // sequences // problem.sharding.parts
    chunk = key_chunk(problem)
    if queries <= 64:
        return FlashTiles(64, 64, 2, 128)
    if queries <= 128:
        return FlashTiles(128, 64 if problem.dim > 128 else 128, 2, 256)
    if problem.dim > 128:
        return FlashTiles(192, 80, 2, 384)
    keys = min(_KEY_TILES, key=lambda option: ceil(chunk / option[0]) * option[1])[0]
    return FlashTiles(192, keys, 2, 384)


def queries_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    """Return (batch, parts, rows) of Q: packed sequences are a batch of 1 and one part."""
    parts = 1 if problem.packed else problem.sharding.parts
    return 1 if problem.packed else problem.batch, parts, problem.q_rows // parts


def keys_shape(problem: AttentionProblem) -> tuple[int, int]:
    """Return (batch, rows) of K."""
    return 1 if problem.packed else problem.batch, problem.k_rows
