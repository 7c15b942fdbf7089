"""Several nodes whose ranks are threads.

Within a node the simulator runs the programs and plans of the collectives; between nodes there is a
mailbox.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Barrier, Lock
from types import SimpleNamespace

import pytest
import torch

import tileweave as tw
from tileweave.ops.collectives.collective import checked
from tileweave.ops.collectives.vectors import as_declared
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import TwoLevels
from tileweave.ops.core.registry import OPERATORS
from tileweave.runtime import Plan
from tileweave.runtime.host.group import Group
from tileweave.runtime.plans.parameters import parameters_of

NODES, LOCAL, PATIENCE_S = 3, 2, 60
_one_at_a_time = Lock()


class Node:
    """The ranks of one node; each calls the ``move`` of its place."""

    def __init__(self, transport: str) -> None:
        self.transport, self.met = transport, Barrier(LOCAL, self._exchange, PATIENCE_S)
        self.calls = [()] * LOCAL

    def _exchange(self) -> None:
        collective, x, _, *options = self.calls[0]
        problem = checked(collective.op, x, None, LOCAL, options)
        steps = collective.steps(problem, self.transport)
        parameters = steps.parameters if isinstance(steps, Plan) else parameters_of(steps)
        given, *_, got = parameters
        inputs = [{"x": as_declared(x, given).numpy()} for _, x, *_ in self.calls]
        with _one_at_a_time:
            actual = tw.simulate(steps, LOCAL, inputs, schedules=1)
        for (_, _, out, *_), result in zip(self.calls, actual, strict=True):
            memory = torch.empty(out.shape, dtype=out.dtype)
            as_declared(memory, got).copy_(torch.from_numpy(result["out"]))
            out.copy_(memory)

    def move(self, place: int):
        def move(*call):
            self.calls[place] = call
            self.met.wait()

        return move


@pytest.fixture
def mailbox(monkeypatch):
    """Replace exchanges: ``start_exchange`` stores the data that ``wait`` returns."""
    boxes = defaultdict(SimpleQueue)

    def start(given, to, got, source, nodes):
        boxes[nodes.local_rank, nodes.rank, to].put(given.clone())
        box = boxes[nodes.local_rank, source, nodes.rank]
        return [SimpleNamespace(wait=lambda: got.copy_(box.get(timeout=PATIENCE_S)))]

    monkeypatch.setattr(nccl, "start_exchange", start)


def ranks_of_nodes() -> list[TwoLevels]:
    """Return the ranks in the order of the result."""
    cpu = torch.device("cpu")
    return [
        TwoLevels(
            Group(node, NODES, local, cpu, None, None), Group(local, LOCAL, local, cpu, None, None)
        )
        for node in range(NODES)
        for local in range(LOCAL)
    ]


SHAPES = {
    "all_gather": (4, 24),
    "reduce_scatter": (4 * NODES * LOCAL, 24),
    "all_reduce": (4 * NODES * LOCAL, 24),
    "all_to_all": (NODES * LOCAL, 24),
}
AXES = {"all_to_all": (0, 1)}


@pytest.mark.parametrize(
    ("op", "transport"),
    [
        (op, transport)
        for op in SHAPES
        for transport in ("copy_engine", "tma", "ldst")
        if op in ("all_gather", "reduce_scatter") or transport == "ldst"
    ],
)
def test_values(mailbox, op, transport):
    collective, ranks, options = OPERATORS[op], ranks_of_nodes(), AXES.get(op, ())
    every = torch.stack([torch.randint(-9, 9, SHAPES[op]).float() for _ in ranks])
    nodes = [Node(transport) for _ in range(NODES)]

    def run(me: TwoLevels) -> torch.Tensor:
        out = torch.full(collective.result(every[0], len(ranks), *options)[0], torch.nan)
        move = nodes[me.nodes.rank].move(me.node.rank)
        collective.across(move, every[me.rank], out, me, *options)
        return out

    with ThreadPoolExecutor(len(ranks)) as threads:
        actual = list(threads.map(run, ranks))
    for rank, out in enumerate(actual):
        assert torch.equal(out, collective.expected(every, rank, *options)), rank
