"""All-gather and reduce-scatter on a mesh of nodes and ranks of a node.

Both levels are gloo's here: that tries the order, the sums and what is refused. A node's own
transports run in test_nodes_simulated.py, and with NCCL in tests/gpu/two_levels.py.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from tests.ops import on_ranks
from tests.ops.collectives import mesh_on_ranks
from tests.ops.core.test_torch import assert_right
from tileweave.ops.collectives.across_nodes import at_any_place
from tileweave.ops.core import nccl
from tileweave.ops.core.problem import is_laid_out
from tileweave.ops.core.registry import OPERATORS

pytestmark = pytest.mark.long

NODES = {
    "2 x 2": ((0, 1), (2, 3)),
    "2 x 2, across": ((0, 2), (1, 3)),
    "4 x 1": ((0,), (1,), (2,), (3,)),
    "1 x 4": ((0, 1, 2, 3),),
}


@pytest.fixture(scope="module")
def four():
    ranks = on_ranks.Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("where", ["new", "out"])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("op", mesh_on_ranks.OPERATORS)
def test_values(four, op, nodes, where):
    assert_right(four.run(mesh_on_ranks.values, op, NODES[nodes], where))


@pytest.mark.parametrize("op", mesh_on_ranks.OPERATORS)
def test_types(four, op):
    assert_right(four.run(mesh_on_ranks.same_as_flat, op))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_are_added_in_fp32_from_the_own_one_on(four, dtype):
    assert four.run(mesh_on_ranks.order_of_sums, dtype) == [True] * 4


@pytest.mark.parametrize("op", mesh_on_ranks.OPERATORS)
def test_gradients(four, op):
    assert_right(four.run(mesh_on_ranks.gradients, op, NODES["2 x 2"], False))


@pytest.mark.parametrize("op", mesh_on_ranks.OPERATORS)
def test_compiled(three, op):
    assert_right(three.run(mesh_on_ranks.gradients, op, ((0,), (1,), (2,)), True))


def test_ranks_of_all_nodes_that_differ_are_told(four):
    for error in four.run(mesh_on_ranks.differ):
        assert "all_gather: the ranks disagree (rank 0: all_gather of (2, 3) float32" in str(error)
        assert "rank 3: all_gather of (2, 4) float32, nccl)" in str(error)


def test_refusals(four):
    for shape, axes, one_axis, operator, transport, out in four.run(mesh_on_ranks.refusals):
        assert shape == (
            "reduce_scatter: x has shape (6, 2); expected a multiple of 4 along axis 0 for 4 ranks"
        )
        assert axes.endswith("or a DeviceMesh with one or two axes")
        assert one_axis.endswith("or a DeviceMesh with one axis")
        assert operator.endswith("or a DeviceMesh with one axis")
        assert transport == (
            "all_gather: transport='ldst', but the tensors are on cpu; expected cuda"
        )
        assert out == "all_gather: out has shape (4,); expected (8,)"


@pytest.mark.parametrize("nodes", [((0, 1), (3, 2)), ((0, 3), (1, 2))])
def test_meshes_in_another_order_than_their_groups(four, nodes):
    for said in four.run(mesh_on_ranks.other_order, *nodes):
        assert re.search("numbers 0, 1 along the other; expected the same order of ranks", said)


def test_transport_is_that_within_a_node(four):
    expected = "nccl: the tensors are on cpu; expected cuda"
    assert four.run(mesh_on_ranks.transport) == [expected] * 4


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("all_gather", "start start move wait move wait move"),
        ("reduce_scatter", "move start move start move wait wait"),
    ],
)
def test_nodes_exchange_while_ranks_of_a_node_do(monkeypatch, op, expected):
    """No wait comes before the last transfer that does not need it."""
    done = []

    def start(*given):
        done.append("start")
        return [SimpleNamespace(wait=lambda: done.append("wait"))]

    monkeypatch.setattr(nccl, "start_exchange", start)
    many, one = torch.zeros(12), torch.zeros(2)
    x, out = (one, many) if op == "all_gather" else (many, one)
    nodes = SimpleNamespace(rank=1, world_size=3)
    OPERATORS[op].across(lambda x, out: done.append("move"), x, out, nodes)
    assert " ".join(done) == expected


@pytest.mark.parametrize("first", [0, 4])
def test_parts_at_odd_places_are_copied(first):
    given, got = torch.arange(12.0), torch.zeros(12)
    x, out = given[first + 1 :], got[first + 1 :]
    seen = []

    def move(x, out):
        seen.extend([is_laid_out(x), is_laid_out(out), x.data_ptr() == given.data_ptr()])
        out.copy_(x)

    at_any_place(move)(x, out)
    at_any_place(move)(given, got)
    assert seen == [True, True, False, True, True, True] and torch.equal(out, x)
