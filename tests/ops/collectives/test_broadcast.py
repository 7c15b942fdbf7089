"""Broadcast: its program on simulated ranks, its arguments, and its compiled kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.collectives import transport as transports
from tileweave.ops.collectives.broadcast import Broadcast, broadcast_program
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.vectors import TiledView
from tileweave.runtime.host.group import Group


@pytest.mark.parametrize(
    ("ranks", "root", "count"), [(1, 0, 64), (2, 1, 96), (3, 0, 208), (4, 2, 112), (5, 4, 12)]
)
def test_every_rank_receives_the_tensor_of_the_root(ranks, root, count):
    """Also after calls before it: three launches in different orders, without a race."""
    view = TiledView.of(count, "int32", 16, 128)
    rng = np.random.default_rng(ranks)
    x = [rng.integers(0, 1 << 30, view.shape).astype(np.int32) for _ in range(ranks)]
    program = broadcast_program(view, ranks, root)
    outputs = tw.simulate(program, ranks, [{"x": own} for own in x], schedules=3, epochs=3)
    assert all(np.array_equal(output["out"], x[root]) for output in outputs)


def test_synchronization_is_inferred():
    explanation = str(tw.explain(broadcast_program(TiledView.of(208, "int32", 16, 128), 3, 1), 3))
    assert "arrived" in explanation and "nothing is inserted" not in explanation


def test_every_mutant_is_accounted_for():
    """No synchronization is superfluous, and the simulator finds each fault."""
    view = TiledView.of(96, "int32", 16, 128)
    inputs = [{"x": np.full(view.shape, rank, np.int32)} for rank in range(3)]
    mutants = tw.mutate(broadcast_program(view, 3, 0), 3, inputs, schedules=5)
    assert [(m.line, m.name, m.why) for m in mutants if not m.is_accounted_for] == []
    assert [m.verdict for m in mutants].count("killed") >= 25


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((), torch.float32),
        ((3, 7), torch.uint8),
        ((5, 3), torch.complex64),
        pytest.param((1 << 32,), torch.bool, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_any_shape_and_type_compiles(shape, dtype):
    problem = checked_problem(
        "broadcast", torch.empty(shape, dtype=dtype, device="meta"), None, 3, [2]
    )
    source = tw.emit(Broadcast.steps(problem, "ldst"), world_size=3)
    assert not re.search(r"blockIdx\.[yz]", source)


@pytest.mark.parametrize(
    ("root", "legal"), [(4, "0 to 3"), (-1, "0 to 3"), (1.5, "0 to 3"), ("first", "0 to 3")]
)
def test_a_root_that_is_no_rank(root, legal):
    message = f"broadcast: root={root!r}; expected a rank from {legal}"
    with pytest.raises(tw.TileWeaveError, match=re.escape(message)):
        checked_problem("broadcast", torch.ones(4), None, 4, [root])


def test_an_out_of_another_shape():
    with pytest.raises(
        tw.TileWeaveError, match=r"broadcast: out has shape \(3,\); expected \(4,\)"
    ):
        ops.broadcast(torch.ones(4), out=torch.ones(3))


def test_the_root_is_part_of_the_problem():
    """Ranks that name different roots disagree, and the message shows both."""
    problems = [checked_problem("broadcast", torch.ones(4, 2), None, 4, [root]) for root in (0, 3)]
    assert [str(problem) for problem in problems] == [
        "broadcast of (4, 2) float32, from rank 0", "broadcast of (4, 2) float32, from rank 3"
    ]  # fmt: skip


@pytest.mark.parametrize("transport", ["copy_engine", "ll"])
def test_transports_without_a_program(monkeypatch, transport):
    monkeypatch.setattr(transports, "obstacle_of_ranks", lambda *_: None)
    group = Group(0, 4, 0, torch.device("cpu"), None, None)
    x = torch.empty(1 << 28, dtype=torch.bfloat16, device="meta")
    arguments = checked_problem("broadcast", x, None, 4, [0]), x.device, group, Broadcast
    assert transports.choose_transport("auto", *arguments).name == "ldst"
    with pytest.raises(tw.TileWeaveError, match=r"has no program by .*; expected 'ldst', 'nccl'$"):
        transports.choose_transport(transport, *arguments)


def test_out_may_be_the_input():
    x = torch.arange(6.0)
    assert ops.broadcast(x, out=x) is x and torch.equal(x, torch.arange(6.0))
