"""Choice and call of the overlapped ``expert_mlp``, and the tables of its kernels."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.moe.by_definition import mixture, random_ids
from tests.ops.moe.simulated_kernels import as_numpy
from tests.ops.simulated_calls import simulated_calls
from tileweave import ops
from tileweave.ops.core.groups import TwoLevels
from tileweave.ops.moe import fused_mlp
from tileweave.ops.moe.fused_mlp import MlpProblem, mlp_plan
from tileweave.ops.moe.segments import segments_of


@pytest.mark.parametrize(("ranks", "per_rank", "choices"), [(1, 3, 2), (3, 2, 4), (4, 1, 3)])
def test_segments(ranks, per_rank, choices):
    """The rows of each segment in the order of the tokens, and the places of their results."""
    num_experts, capacity, generator = ranks * per_rank, 16, torch.Generator().manual_seed(1)
    for seed in range(20):
        rank = seed % ranks
        ids = random_ids(1, 9, choices, num_experts, generator)[0]
        sent, counts, place = segments_of(ids, rank, ranks, num_experts, capacity)
        rows, right_counts, right_place = [], torch.zeros(ranks, per_rank), torch.full_like(ids, -1)
        for e in range(per_rank):
            for owner in [*range(rank, ranks), *range(rank)]:
                expert = owner * per_rank + e
                tokens = (ids == expert).any(-1).nonzero().flatten().tolist()
                rows += tokens
                right_counts[owner, e] = len(tokens)
                for row, token in enumerate(tokens):
                    right_place[token][ids[token] == expert] = expert * capacity + row
        assert sent[: len(rows)].tolist() == rows
        assert torch.equal(counts, right_counts.int()) and torch.equal(place, right_place)


class Simulated:
    """Both kernels, which the simulator runs on one rank."""

    last_used = 0

    def __init__(self, problem, strategy, session):
        self.plan = mlp_plan(problem.config)

    def enqueue(self, inputs, out):
        names = "x", "sent", "counts", "place", "topk_weights", "w_gate_up", "w_down"
        given = {n: as_numpy(t) for n, t in zip(names, inputs, strict=True)}
        as_numpy(out)[...] = tw.simulate(self.plan, 1, [given], epochs=1)[0]["out"]


def inputs():
    torch.manual_seed(0)
    x = torch.randn(6, 256)
    gate_up, down = torch.randn(3, 96, 256) / 16, torch.randn(3, 256, 48) / 7
    ids = torch.tensor([[0, 1], [1, -1], [2, 2], [0, 7], [-1, -1], [1, 0]], dtype=torch.int32)
    x, gate_up, down = (t.to(torch.bfloat16) for t in (x, gate_up, down))
    return x, ids, torch.rand(6, 2), gate_up, down


def test_call(monkeypatch):
    x, ids, weights, *experts = inputs()
    monkeypatch.setattr(fused_mlp, "FusedMlp", Simulated)
    with simulated_calls(monkeypatch, fused_mlp):
        out = ops.expert_mlp(x, ids, weights, *experts, strategy="fused")
    right = mixture(x[None].float(), ids[None], weights[None], *(w.float() for w in experts))[0]
    np.testing.assert_allclose(out.float(), right, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("strategy", ["auto", "separate", "fused"])
def test_separate_steps_are_used(monkeypatch, strategy):
    """By ``auto``, on request, and always under autograd."""
    monkeypatch.setattr("tileweave.ops.moe.fused_mlp._obstacle", lambda *_: None)
    monkeypatch.setattr("tileweave.ops.moe.expert_mlp.fused_mlp", None)
    x, ids, weights, *experts = (t.float() if t.is_floating_point() else t for t in inputs())
    x.requires_grad_(strategy == "fused")
    out = ops.expert_mlp(x, ids, weights, *experts, strategy=strategy)
    torch.testing.assert_close(out, mixture(x[None], ids[None], weights[None], *experts)[0])


def test_auto_uses_the_separate_steps():
    x, ids, _, gate_up, _ = inputs()
    ranks = SimpleNamespace(world_size=1)
    assert not fused_mlp.is_fused("auto", x, ids, gate_up, ranks, None)


REFUSED = [
    ({"strategy": None}, "strategy=None; expected 'auto', 'fused', 'separate'"),
    ({"strategy": "nccl"}, "strategy='nccl'; expected 'auto', 'fused', 'separate'"),
    ({}, "strategy='fused', but the tensors are on cpu; expected cuda"),
    ({"capacity": 4}, "strategy='fused', but capacity=4; expected None"),
    ({"transport": "nccl"}, "strategy='fused', but transport='nccl'; expected 'auto'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused(options, message):
    with pytest.raises(tw.TileWeaveError) as error:
        ops.expert_mlp(*inputs(), **{"strategy": "fused"} | options)
    assert str(error.value) == f"expert_mlp: {message}"


def test_several_nodes():
    """The kernels exchange within one node."""
    ranks = TwoLevels(nodes=SimpleNamespace(world_size=2), node=SimpleNamespace(world_size=1))
    x, ids, _, gate_up, _ = inputs()
    message = "strategy='fused', but the group has several nodes; expected ranks of one node"
    with pytest.raises(tw.TileWeaveError, match=message):
        fused_mlp.is_fused("fused", x, ids, gate_up, ranks, None)


PROBLEM = MlpProblem(128, 8, 8, 7168, 2048, 8, torch.bfloat16)
OBSTACLES = [
    ({"dtype": torch.float32}, "x is of torch.float32; expected torch.bfloat16 or torch.float16"),
    ({"hidden": 2880}, "hidden size 2880; expected a multiple of 256"),
    ({"width": 100}, "intermediate size 100; expected a multiple of 8"),
    ({"tokens": 100_000}, "there are 100000 tokens; expected at most 74880"),
    ({"per_rank": 1 << 22}, "there are 33554432 experts; expected at most 16777215"),
]


@pytest.mark.parametrize(("changes", "message"), OBSTACLES)
def test_obstacles(changes, message):
    assert PROBLEM.obstacle() is None
    assert MlpProblem(**vars(PROBLEM) | changes).obstacle() == message


def test_largest_number_of_tokens():
    """The largest number that the error names is legal."""
    assert MlpProblem(**vars(PROBLEM) | {"tokens": 74880}).obstacle() is None
