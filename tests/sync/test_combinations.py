"""Combinations of values that occur together, over all iterations."""

import numpy as np
import pytest

from tileweave.passes.sync.regions import footprints as boxes
from tileweave.passes.sync.regions.footprints import combinations

pytestmark = pytest.mark.long

SHAPE = (3, 4, 2, 5)


def random_array(rng, most):
    """Return an array that varies along some of the axes."""
    shape = [n if rng.random() < 0.4 else 1 for n in SHAPE]
    return rng.integers(0, most, shape) * int(rng.integers(1, 9))


@pytest.mark.parametrize("seed", range(60))
def test_each_combination_once(seed):
    rng = np.random.default_rng(seed)
    fields = [random_array(rng, 4) for _ in range(rng.integers(1, 5))]
    mask = random_array(rng, 3) > 0
    holds, *every = np.broadcast_arrays(mask, *fields)
    expected = set(zip(*(a[holds].tolist() for a in every), strict=True))
    actual = list(zip(*(a.tolist() for a in combinations(fields, mask)), strict=True))
    assert set(actual) == expected and len(actual) == len(expected)


def test_independent_values_are_not_multiplied(monkeypatch):
    """A loop over k that does not depend on rank and block does not make their arrays longer."""
    longest = 0
    marked = boxes._unique_rows

    def seen(fields, mask):
        nonlocal longest
        longest = max(longest, np.broadcast(mask, *fields).size)
        return marked(fields, mask)

    monkeypatch.setattr(boxes, "_unique_rows", seen)
    rank, block, k = np.ix_(range(8), range(100), range(128))
    actual = combinations([rank, (block + rank) % 7, k * 64], np.ones((1, 1, 1), np.bool_))
    assert longest == 800 and len(actual[0]) == 8 * 7 * 128


def test_too_many_to_be_marked(monkeypatch):
    monkeypatch.setattr(boxes, "_MAX_TABLE_ENTRIES", 10)
    a, b = np.ix_(range(5), range(4))
    first, second = combinations([a + b, b], np.ones((1, 1), np.bool_))
    assert set(zip(first.tolist(), second.tolist(), strict=True)) == {
        (x + y, y) for x in range(5) for y in range(4)
    }
