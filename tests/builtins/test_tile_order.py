"""Tile orders visit every tile exactly once, in the documented order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tileweave as tw
from tileweave import language as W


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 10))
def test_swizzle_2d_is_a_permutation(rows, columns, group):
    tiles = [W.swizzle_2d(i, rows, columns, group) for i in range(rows * columns)]
    assert sorted(tiles) == [(r, c) for r in range(rows) for c in range(columns)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 20))
def test_swizzle_2d_leaves_the_grid_behind_the_last_tile(rows, columns, more):
    row, column = W.swizzle_2d(rows * columns + more, rows, columns)
    assert row >= rows or column >= columns


def test_swizzle_2d_walks_bands_column_by_column():
    assert [W.swizzle_2d(i, 3, 2, 2) for i in range(6)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (2, 0),
        (2, 1),
    ]


@given(st.integers(1, 8), st.integers(1, 20))
def test_own_last_serves_every_owner_and_itself_last(ranks, tiles):
    for rank in range(ranks):
        order = [W.swizzle_ranks(i, tiles, rank, ranks) for i in range(ranks * tiles)]
        assert sorted(order) == [(r, t) for r in range(ranks) for t in range(tiles)]
        assert [owner for owner, _ in order[-tiles:]] == [rank] * tiles
    starts = [W.swizzle_ranks(0, tiles, rank, ranks)[0] for rank in range(ranks)]
    assert sorted(starts) == list(range(ranks))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 45))
def test_own_last_in_chunks_keeps_one_chunk_behind(ranks, tiles, chunk):
    for rank in range(ranks):
        order = [W.swizzle_ranks(i, tiles, rank, ranks, chunk) for i in range(ranks * tiles)]
        assert sorted(order) == [(r, t) for r in range(ranks) for t in range(tiles)]
        when = {taken: i for i, taken in enumerate(order)}
        for owner in range(ranks):
            mine = [when[owner, t] for t in range(tiles)]
            assert mine == sorted(mine)
            for t in range(tiles if owner != rank else 0):
                next_chunk = min((t // chunk + 2) * chunk, tiles) - 1
                assert when[owner, next_chunk] < when[rank, t]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            lambda: W.swizzle_ranks(0, 4, 0, 2, 0),
            "W.swizzle_ranks: chunk=0; expected 1 or more",
        ),
        (lambda: W.swizzle_2d(0, 4, 2, -1), "W.swizzle_2d: group=-1; expected 1 or more"),
    ],
)
def test_less_than_a_tile_is_refused(order, message):
    with pytest.raises(tw.LanguageError, match=message):
        order()
