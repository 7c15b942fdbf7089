"""The cost model of operators on several nodes."""

from __future__ import annotations

import pytest
import torch

from tests.ops.collectives.exchanges import EXCHANGES
from tileweave.builtins.errors import TileWeaveError
from tileweave.ops.attention.problem import checked_attention
from tileweave.ops.autotune.nodes_model import Rates, predict, predict_nodes
from tileweave.ops.autotune.nodes_timeline import (
    Call,
    Phase,
    Prediction,
    Transfer,
    Wait,
    timelines,
)
from tileweave.ops.collectives.collective import Collective, checked_problem
from tileweave.ops.core.operator import Operator
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import operators_of

LOCAL = 4
NODES = (2, 4, 16, 64)
MASKS = {
    "causal": (True, "contiguous"), "zigzag": (True, "zigzag"), "full": (False, "contiguous")
}  # fmt: skip
EVERY = [*operators_of(Operator), *operators_of(Collective), *MASKS]
RATES = (
    Rates(),
    pytest.param(Rates(network=5e3, latency=100.0), marks=pytest.mark.long),
    pytest.param(Rates(network=500e3), marks=pytest.mark.long),
)


def problem_of(name: str, nodes: int):
    """Return a problem whose part for each rank is the same for any number of nodes."""
    ranks, dtype = nodes * LOCAL, torch.bfloat16
    if name in operators_of(Operator):
        rows = 256 if operators_of(Operator)[name].gathers else 256 * ranks
        return Problem(name, rows, 1024, 2048, ranks, dtype, True)
    if name in MASKS:
        causal, layout = MASKS[name]
        q = torch.empty(1, 512, 8, 128, dtype=dtype, device="meta")
        return checked_attention(q, q, q, ranks, causal=causal, layout=layout)
    rows = 256 if name == "all_gather" else 256 * ranks
    x = torch.empty(rows, 512, dtype=dtype, device="meta")
    return checked_problem(name, x, None, ranks, EXCHANGES[name].options)


def assert_sane(prediction: Prediction) -> None:
    """All transfers and calls are inside the timeline; the node works or waits at any time."""
    working = sum(phase.end - phase.begin for phase in prediction.calls)
    assert prediction.total == pytest.approx(working + prediction.exposed)
    assert 0 <= prediction.hidden <= 1 and prediction.network > 0
    assert max(phase.end for phase in prediction.transfers) <= prediction.total + 1e-6
    ends = [phase.end for phase in prediction.calls]
    assert all(
        phase.begin >= end - 1e-6 for phase, end in zip(prediction.calls[1:], ends, strict=False)
    )


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", EVERY)
def test_more_nodes_take_longer(name, rates):
    predictions = [predict(problem_of(name, nodes), nodes, rates) for nodes in NODES]
    for prediction in predictions:
        assert_sane(prediction)
    totals = [prediction.total for prediction in predictions]
    assert totals == sorted(totals) and totals[0] < totals[-1]


@pytest.mark.parametrize("name", EVERY)
def test_a_faster_network_exposes_less(name):
    problem = problem_of(name, 4)
    slow, medium, fast = (
        predict(problem, 4, Rates(network=network, latency=10.0)) for network in (2e3, 50e3, 1e9)
    )
    assert slow.exposed >= medium.exposed >= fast.exposed
    assert slow.total > medium.total >= fast.total
    assert slow.network > medium.network > fast.network


def test_a_transfer_that_is_shorter_than_a_call_is_hidden():
    rates = Rates(network=1e9, latency=1.0)
    for name in ("all_gather", "all_gather_matmul", "zigzag", "full"):
        assert predict(problem_of(name, 4), 4, rates).exposed == 0


def spans(phases: list[Phase]) -> list[tuple[float, float]]:
    return [(phase.begin, phase.end) for phase in phases]


def test_an_all_gather_by_hand():
    """3 nodes of 2 ranks: 1000 bytes to each other rank and node."""
    x = torch.empty(1000, dtype=torch.uint8, device="meta")
    rates = Rates(network=10.0, latency=5.0, nvlink=100.0, call=20.0)
    prediction = predict(checked_problem("all_gather", x, None, 6, ()), 3, rates)
    assert spans(prediction.transfers) == [(0, 105), (100, 205)]
    assert spans(prediction.calls) == [(0, 30), (105, 135), (205, 235)]
    assert (prediction.total, prediction.exposed, prediction.network) == (235, 145, 205)
    assert prediction.hidden == pytest.approx(60 / 205)


def test_sums_are_sent_while_the_next_are_added():
    """3 nodes of 2 ranks: sums of 1000 bytes, in fp16."""
    x = torch.empty(6 * 500, dtype=torch.float16, device="meta")
    rates = Rates(network=10.0, latency=5.0, nvlink=100.0, call=20.0)
    prediction = predict(checked_problem("reduce_scatter", x, None, 6, ()), 3, rates)
    assert spans(prediction.calls) == [(0, 30), (30, 60), (60, 90)]
    assert spans(prediction.transfers) == [(30, 135), (130, 235)]
    assert (prediction.total, prediction.exposed) == (235, 145)


def test_a_broadcast_by_hand():
    """Node 1 of 3 broadcasts 1024 bytes within the node, then sends half of them from each rank."""
    x = torch.empty(1024, dtype=torch.uint8, device="meta")
    rates = Rates(network=10.24, latency=5.0, nvlink=102.4, call=20.0)
    one, root, other = predict_nodes(checked_problem("broadcast", x, None, 6, (2,)), 3, rates)
    assert spans(root.calls) == [(0, 30)]
    for node in (one, root, other):
        assert spans(node.transfers) == [(30, 85)]
    assert spans(one.calls) == spans(other.calls) == [(85, 110)]
    assert (root.transfers[0].targets, one.transfers[0].sources) == ((0, 2), (1,))


def test_a_message_begins_when_both_nodes_have_come_to_it():
    """Node 1 is late; node 0 then is late for the transfer that it started last."""
    sent, received = Transfer({1: 100}, {}), Transfer({}, {0: 100})
    later, earlier = Transfer({}, {1: 100}), Transfer({0: 100}, {})
    late, early = timelines(
        [
            [sent, Call("a", 5.0), later, Wait(sent), Wait(later)],
            [Call("b", 30.0), received, earlier, Wait(received), Wait(earlier)],
        ],
        network=10.0, latency=1.0,
    )  # fmt: skip
    assert spans(late.transfers) == spans(early.transfers) == [(30, 41), (40, 51)]
    assert (late.exposed, early.exposed, late.hidden, early.hidden) == (46, 21, 0, 0)


def test_nodes_that_wait_for_each_other():
    nodes = []
    for other in (1, 0):
        first, second = Transfer({}, {other: 1}), Transfer({other: 1}, {})
        nodes.append([first, Wait(first), second, Wait(second)])
    with pytest.raises(TileWeaveError, match="the nodes 0, 1 wait for each other; expected"):
        timelines(nodes, 1.0, 0.0)
    expected = "node 0 sends 1 messages to node 1, which receives 0"
    with pytest.raises(TileWeaveError, match=expected):
        timelines([[Transfer({1: 1}, {})], []], 1.0, 0.0)


def test_zigzag_is_the_least_work():
    """Only attention takes time. The last node of 8 attends to 7.5 of 8 parts if contiguous."""
    rates = Rates(network=1e12, latency=0.0, nvlink=1e12, call=0.0)
    zigzag, contiguous, full = (
        predict(problem_of(name, 8), 8, rates).total for name in ("zigzag", "causal", "full")
    )
    assert [zigzag / full, contiguous / full] == pytest.approx([4 / 8, 7.5 / 8], rel=1e-3)


@pytest.mark.parametrize("nodes", [1, 3, 2.0])
def test_numbers_of_nodes_that_are_refused(nodes):
    expected = rf"predict: nodes={nodes}; expected an integer from 2 on that divides 8 ranks"
    with pytest.raises(TileWeaveError, match=expected):
        predict(problem_of("all_reduce", 2), nodes)
