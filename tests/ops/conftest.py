"""Processes that all tests of operators share, because starting them takes longer than
most tests."""

from __future__ import annotations

import pytest

from tests.ops import on_ranks


@pytest.fixture(scope="session")
def three():
    ranks = on_ranks.Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    ranks = on_ranks.Ranks(4)
    yield ranks
    ranks.close()
