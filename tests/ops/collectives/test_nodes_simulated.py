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
from tileweave.ops.collectives.collective import checked, in_reach
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

    def __init__(self, steps) -> None:
        self.steps, self.met = steps, Barrier(LOCAL, self._exchange, PATIENCE_S)
        parameters = steps.parameters if isinstance(steps, Plan) else parameters_of(steps)
        self.x, *_, self.out = parameters
        self.given, self.got = [None] * LOCAL, [None] * LOCAL

    def _exchange(self) -> None:
        inputs = [{"x": as_declared(x, self.x).numpy()} for x in self.given]
        with _one_at_a_time:
            actual = tw.simulate(self.steps, LOCAL, inputs, schedules=1)
        for out, result in zip(self.got, actual, strict=True):
            as_declared(out, self.out).copy_(torch.from_numpy(result["out"]))

    def move(self, place: int):
        def move(x, out):
            self.given[place], self.got[place] = x, out
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


@pytest.mark.parametrize("transport", ["copy_engine", "tma", "ldst"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_values(mailbox, op, transport):
    made, ranks = OPERATORS[op], ranks_of_nodes()
    count = len(ranks)
    shape = (4, 24) if op == "all_gather" else (4 * count, 24)
    every = [torch.randint(-9, 9, shape).float() for _ in ranks]
    whole = torch.cat(every) if op == "all_gather" else sum(every)
    rights = [whole] * count if op == "all_gather" else whole.chunk(count)
    problem = checked(op, every[0], None, count, ())
    part, _ = in_reach(problem, every[0], ranks[0])
    nodes = [Node(made.steps(part, transport)) for _ in range(NODES)]

    def run(me: TwoLevels) -> torch.Tensor:
        out = torch.full(problem.result, torch.nan)
        move = nodes[me.nodes.rank].move(me.node.rank)
        made.across(move, every[me.rank], out, me.nodes)
        return out

    with ThreadPoolExecutor(count) as threads:
        actual = list(threads.map(run, ranks))
    for rank, (out, right) in enumerate(zip(actual, rights, strict=True)):
        assert torch.equal(out, right), rank
