"""Collectives on a mesh of nodes and ranks of a node.

Both levels are gloo's here: that tries the order, the sums and what is refused. A node's own
transports run in tests/ops/test_nodes_simulated.py, and with NCCL in tests/gpu/two_levels.py.
"""

from __future__ import annotations

import re
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

import tileweave as tw
from tests.ops import on_ranks
from tests.ops.collectives import mesh_on_ranks
from tests.ops.collectives.exchanges import COMPOSED, EXCHANGES
from tests.ops.core.test_torch import assert_right
from tests.ops.meshes import NODES, THREE, recorded_mesh
from tileweave.ops.core.across_nodes import readable, writable
from tileweave.ops.core.checks import is_contiguous_and_aligned
from tileweave.ops.core.registry import OPERATORS


@pytest.mark.parametrize("what", EXCHANGES)
def test_values_and_gradients(four, what):
    assert_right(four.run(mesh_on_ranks.gradients, what, NODES["2 x 2"], False))


@pytest.mark.long
@pytest.mark.parametrize("where", ["new", "out"])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("what", [what for what in EXCHANGES if what.split()[0] in COMPOSED])
def test_values(four, what, nodes, where):
    assert_right(four.run(mesh_on_ranks.values, what, NODES[nodes], where))


@pytest.mark.parametrize("what", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("nodes", ["2 x 2", "4 x 1"])
def test_torch_distributed_without_a_declaration(four, what, nodes):
    assert_right(four.run(mesh_on_ranks.values_by_all_ranks, what, NODES[nodes]))


def test_torch_distributed_in_a_part_of_the_world(three):
    first, outside, last = three.run(mesh_on_ranks.values_by_some_ranks)
    assert_right([first, last])
    assert outside == {}


def test_torch_distributed_sorts_the_ranks(four):
    nodes = NODES["2 x 2, across"]
    for error in four.run(mesh_on_ranks.values_by_all_ranks, "all_gather", nodes):
        assert str(error) == (
            "group: the mesh has the ranks 0, 2, 1, 3; expected ascending ranks, such as "
            "[[0, 1], [2, 3]]"
        )


@pytest.mark.long
def test_results_in_the_memory_of_the_input(four):
    assert_right(four.run(mesh_on_ranks.in_place))


@pytest.mark.long
@pytest.mark.parametrize("op", mesh_on_ranks.OPERATORS)
def test_types(four, op):
    assert_right(four.run(mesh_on_ranks.same_as_flat, op))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_are_added_in_fp32_from_the_own_one_on(four, dtype):
    assert four.run(mesh_on_ranks.order_of_sums, dtype) == [True] * 4


@pytest.mark.long
@pytest.mark.parametrize("nodes", THREE)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("what", EXCHANGES)
def test_three_ranks(three, what, compiled, nodes):
    assert_right(three.run(mesh_on_ranks.gradients, what, THREE[nodes], compiled))


@pytest.mark.long
def test_ranks_of_all_nodes_that_differ_are_told(four):
    for error in four.run(mesh_on_ranks.differ):
        assert "all_gather: the ranks disagree (rank 0: all_gather of (2, 3) float32" in str(error)
        assert "rank 3: all_gather of (2, 4) float32, nccl)" in str(error)


@pytest.mark.long
def test_refusals(four):
    for shape, axes, ldst, engine, out, root, tuned in four.run(mesh_on_ranks.refusals):
        assert shape == (
            "reduce_scatter: x has shape (6, 2); expected a multiple of 4 along axis 0 for 4 ranks"
        )
        assert axes.endswith("or a DeviceMesh with one or two axes")
        assert ldst == "all_gather: transport='ldst', but the tensors are on cpu; expected cuda"
        assert (
            engine
            == "all_reduce: transport='copy_engine', but the tensors are on cpu; expected cuda"
        )
        assert out == "all_gather: out has shape (4,); expected (8,)"
        assert root == "broadcast: root=4; expected a rank from 0 to 3"
        assert tuned.endswith("or a DeviceMesh with one axis")


@pytest.mark.long
@pytest.mark.parametrize("nodes", [((0, 1), (3, 2)), ((0, 3), (1, 2))])
def test_meshes_in_another_order_than_their_groups(four, nodes):
    for said in four.run(mesh_on_ranks.other_order, *nodes):
        assert re.search("numbers 0, 1 along the other; expected the same order of ranks", said)


@pytest.mark.long
def test_a_dead_node_is_named():
    two = on_ranks.Ranks(2)
    outcomes = []
    for process in two._processes:
        outcomes.append(process.submit(on_ranks._outcome, mesh_on_ranks.dead_node, ()))
    error = outcomes[0].result(timeout=60)
    assert isinstance(error, tw.TileWeaveError), error
    assert str(error).startswith("all_gather: transfer with node 1 (global rank 1): ")
    assert str(error).endswith("; expected every rank to run and to make the same calls")
    assert isinstance(outcomes[1].exception(timeout=60), BrokenProcessPool)
    two.close()


@pytest.mark.long
def test_transport_is_that_within_a_node(four):
    expected = "nccl: the tensors are on cpu; expected cuda"
    assert four.run(mesh_on_ranks.transport) == [expected] * 4


GATHERS = "start start move wait move wait move"
SCATTERS = "move start move start move wait wait"


@pytest.mark.parametrize(
    ("op", "x", "out", "expected"),
    [
        ("all_gather", (2,), (12,), GATHERS),
        ("all_to_all", (12,), (12,), GATHERS),
        ("reduce_scatter", (12,), (2,), SCATTERS),
        ("all_reduce", (24,), (24,), f"{SCATTERS} {GATHERS}"),
    ],
)
def test_nodes_exchange_while_ranks_of_a_node_do(op, x, out, expected):
    """No wait comes before the last transfer that does not need it."""
    log, options = [], (0, 0) if op == "all_to_all" else ()
    OPERATORS[op].across(
        lambda *_: log.append("move"), torch.zeros(x), torch.zeros(out), recorded_mesh(log),
        *options,
    )  # fmt: skip
    assert " ".join(log) == expected


@pytest.mark.parametrize("first", [0, 4])
def test_parts_at_odd_places_are_copied(first):
    x, out = torch.arange(12.0)[first:], torch.zeros(12)[first:]
    strided = torch.zeros(6, 2)[:, 1]
    for tensor, same in ((x, True), (x[1:], False), (strided, False)):
        assert is_contiguous_and_aligned(readable(tensor))
        assert (readable(tensor).data_ptr() == tensor.data_ptr()) == same
    for tensor, same in ((out, True), (out[1:], False), (strided, False)):
        with writable(tensor) as memory:
            assert (
                is_contiguous_and_aligned(memory)
                and (memory.data_ptr() == tensor.data_ptr()) == same
            )
            memory.copy_(torch.arange(float(len(tensor))))
        assert torch.equal(tensor, torch.arange(float(len(tensor))))
