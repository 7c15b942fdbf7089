"""The cost model of several nodes has the order of events of the operators.

Operators run twice: the compositions with the programs of a node in the simulator, and the public
functions with gloo at both levels. Each call and transfer of the model must begin after those whose
results the run's own needs, and overlap with the same ones.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.ops import events_on_ranks
from tests.ops import test_nodes_simulated as simulated
from tests.ops.event_order import CALL, TRANSFER, WAIT, Recorder, Step, Trace, differences
from tests.ops.events_on_ranks import EVERY, MASKS, ROWS, inputs_of, options_of, problem_of
from tests.ops.meshes import NODES
from tileweave.ops.attention.across_nodes import attend_across
from tileweave.ops.autotune import nodes_model, nodes_timeline
from tileweave.ops.collectives import all_gather, all_to_all
from tileweave.ops.core.across_nodes import pieces_of_nodes, wait_for
from tileweave.ops.core.epilogue import NO_EPILOGUE
from tileweave.ops.core.operator import Operator
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.gemm import all_gather_matmul

FAST_TO_SIMULATE = ["all_gather", "reduce_scatter"]
GATHERS = ["all_gather", "all_to_all", "all_gather_matmul", "full", "zigzag"]
SUMS = ["reduce_scatter", "matmul_reduce_scatter"]


def simulate(name: str) -> list[Trace]:
    """Record the composition of an operator, whose calls within the node are simulated."""
    ranks, problem = simulated.RANKS, problem_of(name, simulated.RANKS)

    def run(rank, mesh, node) -> Trace:
        recorder, inputs = Recorder(), inputs_of(name, ranks)
        mesh = recorder.mesh(mesh)
        attend, move, multiply = (
            partial(node, simulation)
            for simulation in (
                partial(simulated.simulate_attention, problem),
                partial(simulated.simulate_collective, "ldst"),
                partial(simulated.simulate_product, "stores"),
            )
        )
        with recorder.recording() as trace:
            if name in MASKS:
                attend_across(recorder.call(attend, op=problem.op), problem, *inputs, mesh)
                return trace
            move = recorder.call(move, out=2)
            if name in operators_of(Operator):
                multiply = recorder.call(multiply, out=3)
                c = torch.empty(problem.shape, dtype=problem.dtype)
                OPERATORS[name].across(multiply, move, *inputs, c, NO_EPILOGUE, mesh)
            else:
                out = torch.empty(problem.result)
                OPERATORS[name].across(move, *inputs, out, mesh, *options_of(name, ranks))
        return trace

    return simulated.on_ranks(run)


@pytest.mark.parametrize("name", [*EVERY, ROWS])
def test_functions_on_gloo(four, name):
    traces = four.run(events_on_ranks.recorded, name, NODES["2 x 2"])
    assert differences(problem_of(name, 4), traces, 2) == []


@pytest.mark.long
@pytest.mark.parametrize("name", [*EVERY, ROWS])
def test_functions_on_nodes_of_one_rank(four, name):
    traces = four.run(events_on_ranks.recorded, name, NODES["4 x 1"])
    assert differences(problem_of(name, 4), traces, 1) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST_TO_SIMULATE else pytest.mark.long)
        for name in EVERY
    ],
)
def test_compositions_in_the_simulator(name):
    traces = simulate(name)
    assert differences(problem_of(name, simulated.RANKS), traces, simulated.LOCAL) == []


@pytest.mark.parametrize("name", [*GATHERS, ROWS])
def test_own_part_first_and_others_when_they_have_arrived(four, name):
    """No part but the first needs to wait for more than one transfer."""
    for trace in four.run(events_on_ranks.recorded, name, NODES["4 x 1"]):
        needed = {
            (second.number, first.number) for first, second in trace.needs if first.kind == TRANSFER
        }
        assert needed == {(1, 0), (2, 1), (3, 2)}
        assert trace.order.index(Step(CALL, 0)) < trace.order.index(Step(WAIT, 0))
        waited = [step.number for step in trace.order if step.kind == WAIT]
        assert waited == [0, 1, 2]


@pytest.mark.parametrize("name", SUMS)
def test_sums_for_other_nodes_first(four, name):
    """The sum for another node is sent when it is computed; the own one is the last."""
    for trace in four.run(events_on_ranks.recorded, name, NODES["4 x 1"]):
        order = [(step.kind, step.number) for step in trace.order]
        assert order[:7] == [
            (kind, number) for number in range(3) for kind in (CALL, TRANSFER)
        ] + [(CALL, 3)]  # fmt: skip
        assert trace.needs >= {(Step(CALL, number), Step(TRANSFER, number)) for number in range(3)}


def no_wait(monkeypatch) -> None:
    monkeypatch.setattr(nodes_model._Work, "wait", lambda work: None)


def wait_at_once(monkeypatch) -> None:
    start = nodes_model._Rank.start

    def start_and_wait(*args):
        works = start(*args)
        wait_for(works)
        return works

    monkeypatch.setattr(nodes_model._Rank, "start", start_and_wait)


def begin_before_the_sum(monkeypatch) -> None:
    perform = nodes_timeline._Timeline._perform

    def perform_early(timeline, action):
        result = perform(timeline, action)
        if isinstance(action, nodes_timeline.Transfer):
            action.started = 0.0
        return result

    monkeypatch.setattr(nodes_timeline._Timeline, "_perform", perform_early)


def own_part_last(monkeypatch) -> None:
    def pieces(*args):
        own, *others = pieces_of_nodes(*args)
        yield from (*others, own)

    for module in (all_gather, all_gather_matmul, all_to_all):
        monkeypatch.setattr(module, "pieces_of_nodes", pieces)


WRONG_MODELS = [
    *((no_wait, name) for name in GATHERS),
    *((wait_at_once, name) for name in (*GATHERS, *SUMS, "all_reduce", "matmul_all_reduce")),
    *((begin_before_the_sum, name) for name in (*SUMS, "matmul_all_reduce", "broadcast")),
    *((own_part_last, name) for name in ("all_gather", "all_gather_matmul", "all_to_all")),
]


@pytest.mark.parametrize(
    ("change", "name"), WRONG_MODELS, ids=[f"{f.__name__}-{name}" for f, name in WRONG_MODELS]
)
def test_a_model_with_another_order_is_found(four, monkeypatch, change, name):
    traces = four.run(events_on_ranks.recorded, name, NODES["2 x 2"])
    change(monkeypatch)
    assert differences(problem_of(name, 4), traces, 2)


@pytest.mark.parametrize("name", ["all_gather", "all_gather_matmul", "all_to_all"])
def test_an_operator_that_waits_too_early_is_found(four, name):
    traces = four.run(events_on_ranks.recorded_with_early_waits, name, NODES["2 x 2"])
    found = differences(problem_of(name, 4), traces, 2)
    assert found and all("waits for" in text for text in found)
