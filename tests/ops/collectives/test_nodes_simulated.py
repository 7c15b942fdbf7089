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
from tileweave.ops.core.across_nodes import Mesh
from tileweave.ops.core.registry import OPERATORS
from tileweave.runtime import Plan
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


def meshes() -> list[Mesh]:
    """Return the mesh of each rank, in the order of the result. Between nodes data is put into a
    box, from which ``wait`` takes it."""
    boxes = defaultdict(SimpleQueue)

    def start_of(node: int, local: int):
        def start(sent, target, received, source):
            for x in sent:
                boxes[local, node, target].put(x.clone())
            return [SimpleNamespace(wait=lambda: take(received, source))]

        def take(received, source):
            for x in received:
                x.copy_(boxes[local, source, node].get(timeout=PATIENCE_S))

        return start

    def broadcast_of(node: int, local: int):
        def broadcast(x, source):
            if node == source:
                for other in range(NODES):
                    boxes[local, node, other].put(x.clone())
            x.copy_(boxes[local, source, node].get(timeout=PATIENCE_S))

        return broadcast

    return [
        Mesh(node, NODES, local, LOCAL, start_of(node, local), broadcast_of(node, local))
        for node in range(NODES)
        for local in range(LOCAL)
    ]


SHAPES = {
    "all_gather": (4, 24),
    "reduce_scatter": (4 * NODES * LOCAL, 24),
    "all_reduce": (4 * NODES * LOCAL, 24),
    "all_to_all": (NODES * LOCAL, 24),
    "broadcast": (5, 24),
}
OPTIONS = {"all_to_all": (0, 1), "broadcast": (3,)}


@pytest.mark.parametrize(
    ("op", "transport"),
    [
        (op, transport)
        for op in SHAPES
        for transport in ("copy_engine", "tma", "ldst")
        if op in ("all_gather", "reduce_scatter") or transport == "ldst"
    ],
)
def test_values(op, transport):
    collective, every_mesh, options = OPERATORS[op], meshes(), OPTIONS.get(op, ())
    count = len(every_mesh)
    every = torch.stack([torch.randint(-9, 9, SHAPES[op]).float() for _ in range(count)])
    nodes = [Node(transport) for _ in range(NODES)]

    def run(rank: int) -> torch.Tensor:
        mesh = every_mesh[rank]
        out = torch.full(collective.result(every[0], count, *options)[0], torch.nan)
        move = nodes[mesh.node].move(mesh.local)
        collective.across(move, every[rank], out, mesh, *options)
        return out

    with ThreadPoolExecutor(count) as threads:
        actual = list(threads.map(run, range(count)))
    for rank, out in enumerate(actual):
        assert torch.equal(out, collective.expected(every, rank, *options)), rank
