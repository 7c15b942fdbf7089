"""Cost model of operators on several nodes.

It runs the composition of an operator, ``across``, on tensors without data, once for each node, and
records calls within the node, transfers and waits. ``nodes_timeline`` then predicts when each of
them begins and ends. tests/ops/test_event_order.py compares this order with that of the operators.

The ranks of a node are assumed to do the same at the same time. The predictions of GEMMs are those
of ``cost_model``. No prediction has been compared with a measurement on several nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, singledispatch
from typing import Any, NamedTuple

import torch

from ..attention.across_nodes import attend_across, require_supported
from ..attention.problem import AttentionProblem
from ..collectives.collective import Collective, checked_problem
from ..core.across_nodes import Mesh
from ..core.collective_problem import CollectiveProblem
from ..core.epilogue import Epilogue
from ..core.operator import Operator
from ..core.problem import Problem, refused
from ..core.registry import OPERATORS, operators_of
from .nodes_timeline import Action, Call, Prediction, Transfer, Wait, timelines


@dataclass(frozen=True)
class Rates:
    """Rates of a cluster. The defaults are assumptions, except ``nvlink``.

    Attributes:
        network: bytes per us that a rank sends to other nodes, and receives from them at the same
            time. The default is an adapter of 400 Gbit/s for each GPU.
        latency: us from the end of a transfer until the receiver continues.
        nvlink: bytes per us that a rank sends within its node.
        call: us of a collective within the node that moves nothing.
        attention: floating-point operations per us of the kernel of attention.
    """

    network: float = 50e3
    latency: float = 20.0
    nvlink: float = 360e3
    call: float = 20.0
    attention: float = 500e6


class _Work(NamedTuple):
    """Work of a transfer, as ``across`` receives it."""

    actions: list[Action]
    transfer: Transfer

    def wait(self) -> None:
        self.actions.append(Wait(self.transfer))


class _Rank:
    """Rank that records what it does. Its members are the functions that ``across`` calls."""

    def __init__(self, rates: Rates, node: int, nodes: int, ranks_per_node: int) -> None:
        self.rates = rates
        self.actions: list[Action] = []
        self.mesh = Mesh(node, nodes, 0, ranks_per_node, self.start, self.broadcast)

    def call(self, what: str, us: float) -> None:
        self.actions.append(Call(what, us))

    def start(
        self, sent: Sequence[torch.Tensor], target: int, received: Sequence[torch.Tensor],
        source: int,
    ) -> list[_Work]:  # fmt: skip
        return [
            self._transfer(
                {target: sum(x.nbytes for x in sent)} if sent else {},
                {source: sum(x.nbytes for x in received)} if received else {},
            )
        ]

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Record a broadcast. Receivers forward what has arrived, so all receive at full rate."""
        if self.mesh.node == source:
            others = [node for node in range(self.mesh.nodes) if node != source]
            self._transfer(dict.fromkeys(others, x.nbytes), {}).wait()
        else:
            self._transfer({}, {source: x.nbytes}).wait()

    def _transfer(self, sent: dict[int, int], received: dict[int, int]) -> _Work:
        transfer = Transfer(sent, received)
        self.actions.append(transfer)
        return _Work(self.actions, transfer)

    def move(
        self, collective: type[Collective], x: torch.Tensor, out: torch.Tensor, *options: int
    ) -> None:
        problem = checked_problem(collective.op, x, None, self.mesh.ranks_per_node, options)
        self.call(collective.op, self.rates.call + problem.bytes_sent / self.rates.nvlink)


def predict(
    problem: Problem | CollectiveProblem | AttentionProblem, nodes: int, rates: Rates | None = None
) -> Prediction:
    """Predict an operator on several nodes.

    Args:
        problem: of all ranks; ``problem.ranks`` is a multiple of ``nodes``.
        nodes: number of nodes, at least 2.

    Returns:
        The prediction of the node that is ready last.

    Raises:
        TileWeaveError: ``nodes`` is not legal, or attention on several nodes does not support the
            problem.
    """
    return max(predict_nodes(problem, nodes, rates), key=lambda prediction: prediction.total)


def predict_nodes(
    problem: Problem | CollectiveProblem | AttentionProblem, nodes: int, rates: Rates | None = None
) -> list[Prediction]:
    """Return the prediction of each node; arguments and errors are those of ``predict``."""
    if type(nodes) is not int or nodes < 2 or problem.ranks % nodes:
        raise refused(
            "predict",
            f"nodes={nodes!r}",
            f"an integer from 2 on that divides {problem.ranks} ranks",
        )
    rates = rates or Rates()
    ranks = [_Rank(rates, node, nodes, problem.ranks // nodes) for node in range(nodes)]
    for rank in ranks:
        _run(problem, rank)
    return timelines([rank.actions for rank in ranks], rates.network, rates.latency)


@singledispatch
def _run(problem: Any, rank: _Rank) -> None:
    """Run the composition of a problem's operator in virtual time."""
    raise NotImplementedError(type(problem))


@_run.register
def _(problem: CollectiveProblem, rank: _Rank) -> None:
    x, out = (
        torch.empty(shape, dtype=problem.dtype, device="meta")
        for shape in (problem.shape, problem.result)
    )
    OPERATORS[problem.op].across(rank.move, x, out, rank.mesh, *problem.options)


@_run.register
def _(problem: Problem, rank: _Rank) -> None:
    a = torch.empty(problem.rows, problem.K, dtype=problem.dtype, device="meta")
    b = torch.empty(problem.K, problem.N, dtype=problem.dtype, device="meta")
    c = torch.empty(problem.shape, dtype=problem.out_dtype, device="meta")

    def multiply(operator: type[Operator], a: torch.Tensor, *_: Any) -> None:
        part = replace(problem, op=operator.op, rows=len(a), ranks=rank.mesh.ranks_per_node)
        rank.call(operator.op, _product_us(part))

    OPERATORS[problem.op].across(multiply, rank.move, a, b, c, Epilogue(), rank.mesh)


@lru_cache
def _product_us(part: Problem) -> float:
    """Return the predicted time of a GEMM within a node; all nodes have the same one."""
    return min(operators_of(Operator)[part.op].predicted(part))


@_run.register
def _(problem: AttentionProblem, rank: _Rank) -> None:
    require_supported(problem)
    q, k, v = (
        torch.empty(problem.batch, *shape, dtype=problem.dtype, device="meta")
        for shape in (
            (problem.q_rows, problem.heads, problem.dim),
            (problem.k_rows, problem.kv_heads, problem.dim),
            (problem.k_rows, problem.kv_heads, problem.v_dim),
        )
    )
    attend = _attention(problem, rank)
    attend_across(attend, problem, q, k, v, rank.mesh, merge=lambda *_: None)


def _attention(problem: AttentionProblem, rank: _Rank) -> Callable[..., Any]:
    """Return the attention within a node, which gathers while it computes."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple:
        rows, keys = q.shape[1], k.shape[1] * rank.mesh.ranks_per_node
        pairs = problem.batch * problem.heads * rows * keys * (0.5 if causal else 1.0)
        operations = 2 * pairs * (problem.dim + problem.v_dim)
        sent = (k.nbytes + v.nbytes) * (rank.mesh.ranks_per_node - 1)
        rates = rank.rates
        rank.call(problem.op, max(operations / rates.attention, sent / rates.nvlink) + rates.call)
        shape = *q.shape[:3], problem.v_dim
        lse = q.new_empty(len(q), problem.heads, rows, dtype=problem.wide_dtype)
        return q.new_empty(shape), lse

    return attend
