"""Strips in which blocks pull the last chunk of the sums of other ranks."""

from dataclasses import replace

import numpy as np
import pytest

from tileweave.ops.core.gemm_config import GemmConfig
from tileweave.ops.core.tiles import FP8, PERSISTENT_TILES, Tiles
from tileweave.ops.gemm.kernels.pull_tail import PullTail

TINY = Tiles(16, 16, 16, stages=2, threads=128)


def last_chunk(rows_per_rank, N, tiles):
    return PullTail.last_chunk(GemmConfig(2 * rows_per_rank, N, 64, 2, "bfloat16", True, tiles))


@pytest.mark.parametrize(
    ("rows_per_rank", "N", "tiles"),
    [
        (512, 8192, PERSISTENT_TILES[0]), (512, 8200, PERSISTENT_TILES[1]),
        (40, 8, PERSISTENT_TILES[2]), (1024, 2048, FP8),
        (2048, 8192, replace(PERSISTENT_TILES[0], num_chunks=4)),
        (1100, 1000, replace(PERSISTENT_TILES[3], group_m=4)),
        (100, 50, replace(TINY, group_m=2)),
    ],
)  # fmt: skip
def test_strips_cover_the_last_chunk_once(rows_per_rank, N, tiles):
    tail = last_chunk(rows_per_rank, N, tiles)
    rows, columns = tiles.chunks(rows_per_rank, N)[-1]
    assert (tail.m, tail.n) == (rows.start, columns.start)
    actual = np.zeros((tail.rows, tail.columns), np.int64)
    for strip in range(tail.strips):
        m, top, n = tail.place(strip)
        end = min(m + top + tail.height, m + tiles.M)
        assert m + top < end
        actual[m + top : end, n : n + tiles.N] += 1
    assert np.all(actual == 1)
    assert actual.shape == (rows.stop - rows.start, columns.stop - columns.start)


@pytest.mark.parametrize("tiles", [*PERSISTENT_TILES, FP8, TINY])
def test_each_thread_has_as_many_bytes_of_a_strip(tiles):
    tail = last_chunk(512, 1024, tiles)
    assert tail.height * tiles.N % ((tiles.threads + 128) * 8) == 0
    assert tail.strips % tail.strips_per_tile == 0


def test_its_first_tile_is_the_first_of_the_last_piece():
    tiles = replace(PERSISTENT_TILES[0], num_chunks=2)
    tail = last_chunk(2048, 8192, tiles)
    chunks = tiles.chunks(2048, 8192)
    assert len(chunks) == 4 and tail.first == 3 * 8 * 16
    assert (tail.m, tail.n) == (1024, 4096)
    assert last_chunk(512, 8192, PERSISTENT_TILES[0]).first == 0
