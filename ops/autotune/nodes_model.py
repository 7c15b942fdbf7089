"""Cost model of operators on several nodes.

It runs the composition of an operator, ``across``, on tensors without data and in virtual time:
calls within the node and transfers between nodes last as long as predicted, and a wait lasts until
its transfer has arrived. So the model has the order of events of the operator itself.

All ranks are assumed to do the same at the same time. The predictions of GEMMs are those of
``cost_model``. No prediction has been compared with a measurement on several nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any, NamedTuple

import torch

from ..attention.across_nodes import attend_across, require_supported
from ..attention.problem import AttentionProblem
from ..collectives.collective import Collective, checked
from ..core.across_nodes import Mesh
from ..core.collective_problem import CollectiveProblem
from ..core.epilogue import Epilogue
from ..core.operator import Operator
from ..core.problem import Problem, refused
from ..core.registry import OPERATORS


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


class Phase(NamedTuple):
    """One call within the node, or one transfer; times in us from the beginning."""

    what: str
    begin: float
    end: float


@dataclass
class Prediction:
    """Predicted timeline of one rank.

    Attributes:
        total: time in us until the result is complete.
        calls: calls within the node.
        transfers: transfers between nodes, until their data can be used.
        exposed: time in us in which the node waits for transfers.
    """

    total: float = 0.0
    calls: list[Phase] = field(default_factory=list)
    transfers: list[Phase] = field(default_factory=list)
    exposed: float = 0.0

    @property
    def network(self) -> float:
        """Time in us in which transfers are in flight."""
        total = end = 0.0
        for phase in sorted(self.transfers, key=lambda phase: phase.begin):
            total += max(phase.end - max(phase.begin, end), 0.0)
            end = max(end, phase.end)
        return total

    @property
    def hidden(self) -> float:
        """Share of ``network`` in which the node works; 1 if nothing is transferred."""
        return 1.0 - self.exposed / self.network if self.network else 1.0


class _Arrival:
    """Work of a transfer in virtual time."""

    def __init__(self, rank: _Rank, end: float) -> None:
        self._rank, self._end = rank, end

    def wait(self) -> None:
        self._rank.wait_until(self._end)


class _Rank:
    """One rank in virtual time; its members are the functions that ``across`` calls."""

    def __init__(self, rates: Rates, ranks_per_node: int) -> None:
        self.rates, self.ranks_per_node = rates, ranks_per_node
        self.prediction = Prediction()
        self._network_free = 0.0

    def call(self, what: str, us: float) -> None:
        prediction = self.prediction
        begin, prediction.total = prediction.total, prediction.total + us
        prediction.calls.append(Phase(what, begin, prediction.total))

    def wait_until(self, end: float) -> None:
        self.prediction.exposed += max(end - self.prediction.total, 0.0)
        self.prediction.total = max(end, self.prediction.total)

    def start(
        self, sent: Sequence[torch.Tensor], target: int, received: Sequence[torch.Tensor],
        source: int,
    ) -> list[_Arrival]:  # fmt: skip
        nbytes = max(sum(x.nbytes for x in tensors) for tensors in (sent, received))
        return [self._transfer(nbytes / self.rates.network + self.rates.latency)]

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        self._transfer(x.nbytes / self.rates.network + self.rates.latency).wait()

    def _transfer(self, us: float) -> _Arrival:
        begin = max(self.prediction.total, self._network_free)
        self._network_free = begin + us - self.rates.latency
        self.prediction.transfers.append(Phase("transfer", begin, begin + us))
        return _Arrival(self, begin + us)

    def move(
        self, collective: type[Collective], x: torch.Tensor, out: torch.Tensor, *options: int
    ) -> None:
        problem = checked(collective.op, x, None, self.ranks_per_node, options)
        self.call(collective.op, self.rates.call + problem.sent / self.rates.nvlink)


def predict(
    problem: Problem | CollectiveProblem | AttentionProblem, nodes: int, rates: Rates | None = None
) -> Prediction:
    """Predict an operator on several nodes.

    Args:
        problem: of all ranks; ``problem.ranks`` is a multiple of ``nodes``.
        nodes: number of nodes, at least 2.

    Returns:
        The prediction of the first node; for causal attention, of the slower one of the first and
        the last.

    Raises:
        TileWeaveError: ``nodes`` is not legal, or attention on several nodes does not support the
            problem.
    """
    if type(nodes) is not int or nodes < 2 or problem.ranks % nodes:
        raise refused(
            "predict",
            f"nodes={nodes!r}",
            f"an integer from 2 on that divides {problem.ranks} ranks",
        )
    rates = rates or Rates()
    is_uneven = isinstance(problem, AttentionProblem) and problem.causal
    predictions = []
    for node in (0, nodes - 1) if is_uneven else (0,):
        rank = _Rank(rates, problem.ranks // nodes)
        mesh = Mesh(node, nodes, 0, rank.ranks_per_node, rank.start, rank.broadcast)
        _run(problem, mesh, rank)
        predictions.append(rank.prediction)
    return max(predictions, key=lambda prediction: prediction.total)


@singledispatch
def _run(problem: Any, mesh: Mesh, rank: _Rank) -> None:
    """Run the composition of a problem's operator in virtual time."""
    raise NotImplementedError(type(problem))


@_run.register
def _(problem: CollectiveProblem, mesh: Mesh, rank: _Rank) -> None:
    x, out = (
        torch.empty(shape, dtype=problem.dtype, device="meta")
        for shape in (problem.shape, problem.result)
    )
    OPERATORS[problem.op].across(rank.move, x, out, mesh, *problem.options)


@_run.register
def _(problem: Problem, mesh: Mesh, rank: _Rank) -> None:
    a = torch.empty(problem.rows, problem.K, dtype=problem.dtype, device="meta")
    b = torch.empty(problem.K, problem.N, dtype=problem.dtype, device="meta")
    c = torch.empty(problem.shape, dtype=problem.out_dtype, device="meta")

    def multiply(operator: type[Operator], a: torch.Tensor, *_: Any) -> None:
        part = replace(problem, op=operator.op, rows=len(a), ranks=mesh.ranks_per_node)
        rank.call(operator.op, min(operator.predicted(part)))

    OPERATORS[problem.op].across(multiply, rank.move, a, b, c, Epilogue(), mesh)


@_run.register
def _(problem: AttentionProblem, mesh: Mesh, rank: _Rank) -> None:
    require_supported(problem)
    q, k, v = (
        torch.empty(problem.batch, *shape, dtype=problem.dtype, device="meta")
        for shape in (
            (problem.q_rows, problem.heads, problem.dim),
            (problem.k_rows, problem.kv_heads, problem.dim),
            (problem.k_rows, problem.kv_heads, problem.v_dim),
        )
    )
    attend_across(_attention(problem, rank), problem, q, k, v, mesh)


def _attention(problem: AttentionProblem, rank: _Rank) -> Callable[..., Any]:
    """Return the attention within a node, which gathers while it computes."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple:
        rows, keys = q.shape[1], k.shape[1] * rank.ranks_per_node
        pairs = problem.batch * problem.heads * rows * keys * (0.5 if causal else 1.0)
        operations = 2 * pairs * (problem.dim + problem.v_dim)
        sent = (k.nbytes + v.nbytes) * (rank.ranks_per_node - 1)
        rates = rank.rates
        rank.call(problem.op, max(operations / rates.attention, sent / rates.nvlink) + rates.call)
        shape = *q.shape[:3], problem.v_dim
        lse = q.new_empty(len(q), problem.heads, rows, dtype=problem.wide_dtype)
        return q.new_empty(shape), lse

    return attend
