"""Several nodes whose ranks are threads.

Within a node the simulator runs the programs and plans of the operators; between nodes there is a
mailbox.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Barrier, Lock
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.collectives.exchanges import COMPOSED, EXCHANGES
from tileweave.ops.attention.across_nodes import attend_across
from tileweave.ops.attention.flash import FlashTiles
from tileweave.ops.attention.problem import checked_attention
from tileweave.ops.attention.reference import reference_attention
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.collectives.collective import checked_problem
from tileweave.ops.core.across_nodes import Mesh
from tileweave.ops.core.compiled import as_declared
from tileweave.ops.core.epilogue import NO_EPILOGUE, Epilogue
from tileweave.ops.core.problem import checked_problem as checked_product
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.core.tiles import Choice, Tiles
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime import Plan
from tileweave.runtime.plans.parameters import parameters_of

NODES, LOCAL, PATIENCE_S = 3, 2, 60
RANKS = NODES * LOCAL
_one_at_a_time = Lock()


class Node:
    """The ranks of one node, which make the same calls."""

    def __init__(self) -> None:
        self._met = Barrier(LOCAL, self._run, PATIENCE_S)
        self._calls, self._results = [()] * LOCAL, [None] * LOCAL

    def _run(self) -> None:
        simulate = self._calls[0][0]
        with _one_at_a_time:
            self._results = simulate([arguments for _, *arguments in self._calls])

    def __call__(self, simulate: Callable, place: int, *arguments):
        """Return the result of one rank of ``simulate(arguments of all ranks)``."""
        self._calls[place] = simulate, *arguments
        self._met.wait()
        return self._results[place]


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


def on_ranks(run: Callable[[int, Mesh, Callable], torch.Tensor]) -> list:
    """Return the result of ``run(rank, mesh, node)`` on each rank. ``node(simulate, *arguments)``
    makes a call within the rank's node."""
    nodes = [Node() for _ in range(NODES)]

    def call(rank: int, mesh: Mesh):
        node = nodes[mesh.node]
        return run(rank, mesh, lambda simulate, *arguments: node(simulate, mesh.local, *arguments))

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(call, range(RANKS), meshes()))


def simulate_collective(transport: str, calls: list) -> list[None]:
    collective, x, _, *options = calls[0]
    steps = collective.steps(checked_problem(collective.op, x, None, LOCAL, options), transport)
    parameters = steps.parameters if isinstance(steps, Plan) else parameters_of(steps)
    given, *_, got = parameters
    inputs = [{"x": as_declared(x, given).numpy()} for _, x, *_ in calls]
    actual = tw.simulate(steps, LOCAL, inputs, schedules=1)
    for (_, _, out, *_), result in zip(calls, actual, strict=True):
        memory = torch.empty(out.shape, dtype=out.dtype)
        as_declared(memory, got).copy_(torch.from_numpy(result["out"]))
        out.copy_(memory)
    return [None] * LOCAL


SHAPES = {
    **dict.fromkeys(COMPOSED, (4, 24)),
    "reduce_scatter": (4 * RANKS, 24),
    "all_reduce": (4 * RANKS, 24),
    "all_to_all": (RANKS, 24),
    "broadcast": (5, 24),
}
"""Shapes of inputs. A collective that scatters no axis needs no entry."""
OPTIONS = {name: EXCHANGES[name].options for name in SHAPES} | {"broadcast": (3,)}


@pytest.mark.parametrize(
    ("op", "transport"),
    [
        (op, transport)
        for op in SHAPES
        for transport in ("copy_engine", "ldst")
        if op in ("all_gather", "reduce_scatter") or transport == "ldst"
    ],
)
def test_collectives(op, transport):
    collective, options = OPERATORS[op], OPTIONS[op]
    every = torch.stack([torch.randint(-9, 9, SHAPES[op]).float() for _ in range(RANKS)])

    def run(rank, mesh, node):
        out = torch.full(collective.result(every[0], RANKS, *options)[0], torch.nan)
        move = partial(node, partial(simulate_collective, transport))
        collective.across(move, every[rank], out, mesh, *options)
        return out

    for rank, out in enumerate(on_ranks(run)):
        assert torch.equal(out, collective.expected(every, rank, *options)), rank


TILES = Tiles(16, 16, 16, stages=2, threads=32, group_m=1)


def simulate_product(program: str, calls: list) -> list[None]:
    operator, a, b, *_ = calls[0]
    problem = checked_product(operator.op, a, b, LOCAL)
    steps = operator.program(problem, Choice(program, TILES))
    inputs = [{"A": a.numpy(), "B": b.numpy()} for _, a, b, *_ in calls]
    for p in steps.parameters if isinstance(steps, Plan) else ():
        if p.name == "identity":
            for given in inputs:
                given["identity"] = np.eye(*p.extents).astype(np.float16)
    actual = tw.simulate(steps, LOCAL, inputs, schedules=1, resident_blocks=32)
    for (_, _, _, out, _), result in zip(calls, actual, strict=True):
        out.copy_(torch.from_numpy(result["C"]).view(out.shape))
    return [None] * LOCAL


@pytest.mark.long
@pytest.mark.parametrize("program", ["copy_engines", "stores"])
@pytest.mark.parametrize("op", operators_of(GemmOperator))
def test_products(op, program):
    """Sums of integers are exact. The last rank of an all-reduce has no rows of its own."""
    rows, N, K = (24 if op == "all_gather_matmul" else 24 * RANKS), 40, 24
    rows -= op == "matmul_all_reduce"
    every = [
        tuple(torch.randint(-2, 3, shape).half() for shape in ((rows, K), (K, N)))
        for _ in range(RANKS)
    ]
    total = sum(a.float() @ b.float() for a, b in every)
    bias = torch.randint(-9, 9, (N,)).half()

    def run(rank, mesh, node):
        a, b = every[rank]
        c = torch.full(checked_product(op, a, b, RANKS).shape, torch.nan, dtype=a.dtype)
        added = NO_EPILOGUE if op == "all_gather_matmul" else Epilogue(bias)
        multiply = partial(node, partial(simulate_product, program))
        move = partial(node, partial(simulate_collective, "ldst"))
        OPERATORS[op].across(multiply, move, a, b, c, added, mesh)
        return c

    gathered = torch.cat([a for a, _ in every]).float()
    for rank, c in enumerate(on_ranks(run)):
        right = {
            "all_gather_matmul": lambda rank=rank: gathered @ every[rank][1].float(),
            "matmul_reduce_scatter": lambda rank=rank: (total + bias).chunk(RANKS)[rank],
            "matmul_all_reduce": lambda: total + bias,
        }[op]()
        assert torch.equal(c.float(), right), rank


def simulate_attention(problem, calls: list) -> list[tuple]:
    (q, k, _, causal), tiles = calls[0], FlashTiles(16, 16, 2, 128)
    part = replace(
        problem, ranks=LOCAL, causal=causal, q_rows=q.shape[1], k_rows=k.shape[1],
        layout=problem.layout if causal else "contiguous",
    )  # fmt: skip
    inputs = [
        {
            "Q": q.view(len(q), part.sharding.parts, -1, *q.shape[2:]).numpy(),
            "K": k.flatten(2).numpy(),
            "V": v.flatten(2).numpy(),
        }
        for q, k, v, _ in calls
    ]
    actual = tw.simulate(sp_attention_plan(part, tiles), LOCAL, inputs, schedules=1)
    return [
        (
            torch.from_numpy(result["Out"]).reshape(part.shape),
            torch.from_numpy(result["LSE"]).reshape(part.lse_shape),
        )
        for result in actual
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("causal", "layout"), [(True, "contiguous"), (True, "zigzag"), (False, "contiguous")]
)
def test_attention(causal, layout):
    shapes = (2, 8, 2, 16), (2, 8, 1, 16), (2, 8, 1, 16)
    every = [tuple(torch.randn(shape) for shape in shapes) for _ in range(RANKS)]
    problem = checked_attention(*every[0], RANKS, causal=causal, layout=layout)

    def run(rank, mesh, node):
        attend = partial(node, partial(simulate_attention, problem))
        return attend_across(attend, problem, *every[rank], mesh)

    _, ks, vs = zip(*every, strict=True)
    for rank, (out, lse) in enumerate(on_ranks(run)):
        right, right_lse = reference_attention(problem, rank, every[rank][0], ks, vs)
        assert torch.allclose(out, right, atol=2e-4), rank
        assert torch.allclose(lse, right_lse, atol=2e-4), rank
