"""Two groups in each process: the axes of a 2 x 2 mesh."""

from __future__ import annotations

import pytest

from tests.ops import groups_on_ranks


@pytest.mark.long
def test_operators_of_both_axes_in_turns(four):
    assert four.run(groups_on_ranks.interleaved) == [""] * 4


def test_a_transformer_block_has_the_gradients_of_one_process(four):
    for error, tolerance in four.run(groups_on_ranks.block):
        assert 0 < error <= tolerance
