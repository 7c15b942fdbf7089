"""Strips in which blocks fetch the last piece of what others own."""

from dataclasses import replace

import numpy as np
import pytest

from tileweave.ops.core.tiles import FP8, WALKED, Tiles
from tileweave.ops.gemm.pull_tail import PullTail

TINY = Tiles(16, 16, 16, stages=2, threads=128)


@pytest.mark.parametrize(
    ("share", "N", "tiles"),
    [
        (512, 8192, WALKED[0]), (512, 8200, WALKED[1]), (40, 8, WALKED[2]), (1024, 2048, FP8),
        (2048, 8192, replace(WALKED[0], num_chunks=4)), (1100, 1000, replace(WALKED[3], group_m=4)),
        (100, 50, replace(TINY, group_m=2)),
    ],
)  # fmt: skip
def test_strips_cover_the_last_piece_once(share, N, tiles):
    fetched = PullTail.of(share, N, tiles)
    rows, columns = tiles.pieces(share, N)[-1]
    assert (fetched.m, fetched.n) == (rows.start, columns.start)
    found = np.zeros((fetched.rows, fetched.columns), np.int64)
    for strip in range(fetched.strips):
        m, top, n = fetched.place(strip)
        end = min(m + top + fetched.height, m + tiles.M)
        assert m + top < end
        found[m + top : end, n : n + tiles.N] += 1
    assert np.all(found == 1)
    assert found.shape == (rows.stop - rows.start, columns.stop - columns.start)


@pytest.mark.parametrize("tiles", [*WALKED, FP8, TINY])
def test_each_thread_has_as_many_bytes_of_a_strip(tiles):
    fetched = PullTail.of(512, 1024, tiles)
    assert fetched.height * tiles.N % ((tiles.threads + 128) * 8) == 0
    assert fetched.strips % fetched.of_tile == 0


def test_its_first_tile_is_the_first_of_the_last_piece():
    tiles = replace(WALKED[0], num_chunks=2)
    fetched = PullTail.of(2048, 8192, tiles)
    pieces = tiles.pieces(2048, 8192)
    assert len(pieces) == 4 and fetched.first == 3 * 8 * 16
    assert (fetched.m, fetched.n) == (1024, 4096)
    assert PullTail.of(512, 8192, WALKED[0]).first == 0
