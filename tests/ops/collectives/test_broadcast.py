"""Broadcast: its program and plan on simulated ranks, its arguments, and its compiled kernels."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.collectives import transport as transports
from tileweave.ops.collectives.broadcast import Broadcast, broadcast_plan, broadcast_program
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.collectives.vectors import Lines
from tileweave.runtime.host.group import Group

TRANSPORTS = {"tma": None, "ldst": None, "copy_engine": None, "copy_engine, two blocks": 2}
"""Number of blocks of the kernel that collects pieces, by transport; None for one per tile."""


def program_of(lines: Lines, ranks: int, root: int, transport: str):
    if not transport.startswith("copy_engine"):
        return broadcast_program(lines, ranks, root, transport)
    cut = (lines.tiles - 1) * lines.height
    pieces = [slice(0, cut), slice(cut, lines.rows)] if cut else [slice(0, lines.rows)]
    return broadcast_plan(lines, root, pieces, TRANSPORTS[transport])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("ranks", "root", "count"), [(1, 0, 64), (2, 1, 96), (3, 0, 208), (4, 2, 112), (5, 4, 12)]
)
def test_every_rank_receives_the_tensor_of_the_root(ranks, root, count, transport):
    """Also after calls before it: three launches in different orders, without a race."""
    lines = Lines.of(count, "int32", 16, 128)
    rng = np.random.default_rng(ranks)
    x = [rng.integers(0, 1 << 30, lines.shape).astype(np.int32) for _ in range(ranks)]
    program = program_of(lines, ranks, root, transport)
    outputs = tw.simulate(program, ranks, [{"x": own} for own in x], schedules=3, epochs=3)
    assert all(np.array_equal(output["out"], x[root]) for output in outputs)


@pytest.mark.parametrize("transport", ["ldst", "copy_engine"])
def test_synchronization_is_inferred(transport):
    explanation = str(tw.explain(program_of(Lines.of(208, "int32", 16, 128), 3, 1, transport), 3))
    assert "arrived" in explanation and "nothing is inserted" not in explanation


@pytest.mark.parametrize("transport", ["tma", "ldst"])
def test_every_mutant_is_accounted_for(transport):
    """No synchronization is superfluous, and the simulator finds each fault."""
    lines = Lines.of(96, "int32", 16, 128)
    inputs = [{"x": np.full(lines.shape, rank, np.int32)} for rank in range(3)]
    mutants = tw.mutate(program_of(lines, 3, 0, transport), 3, inputs, schedules=5)
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
@pytest.mark.parametrize("transport", ["ldst", "copy_engine"])
def test_any_shape_and_type_compiles(shape, dtype, transport):
    problem = checked_problem(
        "broadcast", torch.empty(shape, dtype=dtype, device="meta"), None, 3, [2]
    )
    steps = Broadcast.steps(problem, transport)
    for program in steps.kernels(3) if isinstance(steps, tw.Plan) else [steps]:
        assert not re.search(r"blockIdx\.[yz]", tw.emit(program, world_size=3))


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


@pytest.mark.parametrize(
    ("count", "asked", "name"),
    [
        (1 << 28, "auto", "ldst"),
        (7, "tma", None),
        (8, "tma", "tma"),
        (7, "copy_engine", "copy_engine"),
    ],
)
def test_transports(monkeypatch, count, asked, name):
    """SMs are the fastest, and the TMA needs a multiple of 16 bytes."""
    monkeypatch.setattr(transports, "obstacle_of_ranks", lambda *_: None)
    group = Group(0, 4, 0, torch.device("cpu"), None, None)
    x = torch.empty(count, dtype=torch.bfloat16, device="meta")
    problem = checked_problem("broadcast", x, None, 4, [0])
    arguments = asked, problem, torch.device("cuda", 0), group, Broadcast
    if name is None:
        with pytest.raises(tw.TileWeaveError, match="14 bytes without a gap; expected a multiple"):
            transports.choose_transport(*arguments)
    else:
        assert transports.choose_transport(*arguments).name == name


def test_out_may_be_the_input():
    x = torch.arange(6.0)
    assert ops.broadcast(x, out=x) is x and torch.equal(x, torch.arange(6.0))
