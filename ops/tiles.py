"""Which tiles a GEMM is cut into: the one table."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Tiles:
    """How the blocks of a kernel multiply.

    Attributes:
        M, N, K: of one tile, in elements.
        stages: tiles of both operands in flight.
        threads: of a block, without the producer that TileLang adds.
    """

    M: int
    N: int
    K: int
    stages: int
    threads: int = 256


LARGE = Tiles(128, 256, 64, stages=3)
SMALL = Tiles(128, 128, 64, stages=4)
SMS = 132
"""Streaming multiprocessors of an H100 or H200, each of which computes one tile at a time."""


def tiles_for(rows: int, columns: int, shards: int) -> Tiles:
    """Large tiles where they fill the GPU once, else small ones.

    Args:
        rows, columns: of what one shard of the GEMM computes, in elements.
        shards: of the GEMM, whose rows no tile crosses.
    """
    large = shards * ceil(rows / LARGE.M) * ceil(columns / LARGE.N)
    return LARGE if large >= SMS else SMALL
