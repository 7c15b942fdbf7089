"""Processes that all tests of operators share: to start them takes longer than most of these."""

from __future__ import annotations

import pytest

from tests.ops import on_ranks


@pytest.fixture(scope="session")
def three():
    ranks = on_ranks.Ranks(3)
    yield ranks
    ranks.close()
