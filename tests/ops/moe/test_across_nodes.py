"""Mixtures of experts on a mesh of nodes and ranks of a node; both levels are gloo's here."""

from __future__ import annotations

import pytest
import torch

from tests.ops.core.test_torch import assert_right
from tests.ops.meshes import NODES, THREE
from tests.ops.moe import moe_on_ranks
from tests.ops.moe.moe_on_ranks import Layer
from tests.ops.moe.test_operators import LAYERS

TWO_BY_TWO = NODES["2 x 2"]


@pytest.mark.long
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_four_ranks(four, layer, nodes):
    assert_right(four.run(moe_on_ranks.apply, layer, NODES[nodes], False))


@pytest.mark.long
@pytest.mark.parametrize("nodes", THREE)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_three_ranks(three, layer, compiled, nodes):
    assert_right(three.run(moe_on_ranks.apply, layer, THREE[nodes], compiled))


@pytest.mark.parametrize("capacity", [None, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows(four, dtype, capacity):
    """Their order is that of one level."""
    layer = Layer(capacity=capacity, tokens=7)
    assert_right(four.run(moe_on_ranks.rows, layer, dtype, TWO_BY_TWO))


def test_quantized_rows(four):
    layer = Layer(routing=4, hidden=300, choices=3, capacity=9)
    assert_right(four.run(moe_on_ranks.quantized_rows, layer, torch.bfloat16, TWO_BY_TWO))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_in_fp32(four, dtype):
    assert_right(four.run(moe_on_ranks.types, dtype, TWO_BY_TWO))


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("capacity", "5 tokens of 10 float64, top-2, 8 experts, capacity 17, auto; rank 1:"),
        ("columns", "5 tokens of 6 float32, top-2, 8 experts, capacity 40, auto; rank 1:"),
        ("tokens", "1 tokens of 10 float64, top-2, 8 experts, capacity 8, auto; rank 1:"),
    ],
)
def test_ranks_that_disagree_are_told(four, what, shown):
    for error in four.run(moe_on_ranks.differ, what, TWO_BY_TWO):
        assert f"dispatch: the ranks disagree (rank 0: dispatch of {shown}" in str(error)
