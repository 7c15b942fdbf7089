"""Attention on a mesh of nodes and ranks of a node; both levels are gloo's here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.attention import mesh_on_ranks
from tests.ops.core.test_torch import assert_right
from tests.ops.meshes import NODES, THREE, recorded_mesh
from tileweave.ops.attention.across_nodes import attend_across, visible_slices
from tileweave.ops.attention.problem import checked_attention

MASKS = [(True, "contiguous"), (True, "zigzag"), (False, "contiguous"), (False, "zigzag")]
NAMES = ["causal, contiguous", "causal, zigzag", "full, contiguous", "full, zigzag"]


def problem_of(causal: bool, layout: str, ranks: int):
    q = torch.empty(1, 4, 2, 8, device="meta")
    return checked_attention(q, q, q, ranks, causal=causal, layout=layout)


@pytest.mark.long
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(("causal", "layout"), MASKS, ids=NAMES)
def test_four_ranks(four, causal, layout, nodes):
    longer = not causal
    assert_right(four.run(mesh_on_ranks.attend, NODES[nodes], causal, layout, longer, False))


@pytest.mark.long
@pytest.mark.parametrize("nodes", THREE)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("causal", "layout"), MASKS, ids=NAMES)
def test_three_ranks(three, causal, layout, compiled, nodes):
    assert_right(three.run(mesh_on_ranks.attend, THREE[nodes], causal, layout, False, compiled))


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["2 x 2", "4 x 1"])
def test_module_and_ulysses(four, nodes):
    assert_right(four.run(mesh_on_ranks.module, NODES[nodes]))


@pytest.mark.long
def test_gradients_of_packed_sequences(four):
    assert_right(four.run(mesh_on_ranks.packed_gradients))


@pytest.mark.long
def test_refusals(four):
    for rows, packed, fused, ulysses in four.run(mesh_on_ranks.refusals):
        assert rows == (
            "sp_attention: q has 4 rows and k has 8 on each rank and causal=True on several "
            "nodes; expected equal numbers"
        )
        assert packed == "sp_attention: cu_seqlens_q is given on several nodes; expected None"
        assert fused == "sp_attention: strategy='fused', but the tensors are on cpu; expected cuda"
        assert ulysses == (
            "ulysses_attention: transport='ldst', but the tensors are on cpu; expected cuda"
        )


@pytest.mark.parametrize(("causal", "layout"), MASKS, ids=NAMES)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (4, 1)])
def test_seen_is_what_the_mask_shows(shape, causal, layout):
    """Compare every pair of a query and a key of different nodes with their positions."""
    (nodes, local), ranks = shape, shape[0] * shape[1]
    problem = problem_of(causal, layout, ranks)
    rows = range(problem.q_rows)

    def position(rank, row):
        return problem.sharding.position(row, rank, problem.q_total)

    for node, owner in ((n, o) for n in range(nodes) for o in range(nodes) if n != o):
        visible = visible_slices(problem, node, owner)
        for me, other in ((m, o) for m in range(local) for o in range(local)):
            shown = {
                (q, k)
                for q in rows
                for k in rows
                if not causal
                or position(owner * local + other, k) <= position(node * local + me, q)
            }
            expected = set()
            if visible is not None:
                expected = {(q, k) for q in rows[visible.queries] for k in rows[visible.keys]}
            assert shown == expected


def test_keys_arrive_while_the_node_attends():
    """The next keys are in flight during each part, and no more than those."""
    log = []

    def attend(q, k, v, causal):
        log.append("causal" if causal else "full")
        return torch.zeros_like(q), torch.zeros(1, 2, q.shape[1])

    problem = replace(problem_of(True, "zigzag", 6), dtype=torch.float32)
    q = torch.zeros(1, 4, 2, 8)
    attend_across(attend, problem, q, q, q, recorded_mesh(log))
    assert " ".join(log) == "start causal start wait full wait full"
