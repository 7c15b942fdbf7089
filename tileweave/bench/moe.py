"""Mixtures of experts in ``tileweave bench``: our operators, and all-to-all and grouped GEMMs of
torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import ops
from ..ops.core import nccl
from ..ops.core.registry import OPERATORS, RegisteredOp
from ..ops.core.strategy import Strategy
from ..ops.moe.combine import Combine
from ..ops.moe.dispatch import Dispatch
from ..ops.moe.expert_mlp import ExpertMlp
from ..ops.moe.grouped_matmul import GroupedMatmul
from ..runtime.host.group import Group
from .case import (
    INPUTS,
    OURS,
    TORCH,
    Buffers,
    Case,
    Constructor,
    Family,
    Implementation,
    by_call,
)
from .moe_shapes import ITEMSIZE, SETS, Model, Tables, Work, choices_of, shapes_of, tables_of
from .results import MoeShape

if TYPE_CHECKING:
    from .selection import BenchOptions

GATE_UP, DOWN = Work(0, 2, "gate_up"), Work(0, 1, "down")
"""Products of an expert's MLP, which are cases of their own."""
WORK: dict[type[RegisteredOp], tuple[Work, ...]] = {
    Dispatch: (Work(1, 0),),
    Combine: (Work(1, 0),),
    GroupedMatmul: (GATE_UP, DOWN),
    ExpertMlp: (Work(2, 3),),
}
"""Cases of each operator."""


def cases(operator: type[RegisteredOp], options: BenchOptions, ranks: int) -> list[Case]:
    """Return the cases of an operator: the products of a grouped GEMM have one each."""
    return [
        Case(
            operator.op,
            shape,
            FAMILY,
            operations=operations_of(shape),
            symmetric_bytes=symmetric_bytes(operator, shape),
            gathered_bytes=0,
            implementations=IMPLEMENTATIONS[operator],
            device_bytes=device_bytes(shape),
            obstacle=obstacle_of(shape),
        )
        for work in WORK[operator]
        for shape in shapes_of(options, ranks, work)
    ]


def operations_of(shape: MoeShape) -> int:
    """Return the operations of all ranks: of the products, or at least one for each weight and for
    each byte of the rows."""
    weights = 3 * shape.experts * shape.hidden * shape.intermediate if shape.flops else 0
    rows = 2 * ITEMSIZE * shape.ranks * shape.rows * shape.hidden
    return max(shape.ranks * shape.flops, weights, rows)


def symmetric_bytes(operator: type[RegisteredOp], shape: MoeShape) -> int:
    """Return the symmetric memory of all operators that a case calls: for tokens, two buffers of
    sums, and the experts of all tokens."""
    if operator is GroupedMatmul:
        return 0
    rows = 3 * shape.ranks * shape.tokens
    ids = 8 * shape.tokens * shape.top_k
    return rows * shape.hidden * ITEMSIZE + 3 * shape.ranks * ids


def device_bytes(shape: MoeShape) -> int:
    """Return the memory of the weights of a rank's experts, and of the rows between their products,
    of each set of inputs and once more in fp32."""
    weight = shape.hidden * shape.intermediate if shape.flops else 0
    row = shape.hidden + 3 * shape.intermediate if shape.flops else 2 * shape.hidden
    weights = ITEMSIZE * 3 * shape.experts // shape.ranks * weight
    tokens = ITEMSIZE * INPUTS * shape.ranks * shape.tokens * shape.hidden
    return weights + tokens + (ITEMSIZE * INPUTS + 4) * shape.rows * row


def obstacle_of(shape: MoeShape) -> str | None:
    """Return why the ranks cannot share the experts, with what is expected; None if they can."""
    if shape.experts % shape.ranks == 0:
        return None
    return (
        f"{shape.model} has {shape.experts} experts; expected a multiple of {shape.ranks} for "
        f"{shape.ranks} ranks"
    )


class Problem(NamedTuple):
    """Shape of the operands of each rank."""

    op: str
    shape: MoeShape
    dtype: torch.dtype

    @property
    def model(self) -> Model:
        """The mixture."""
        shape = self.shape
        return Model(shape.experts, shape.top_k, shape.hidden, shape.intermediate)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.shape.ranks


def problem_of(op: str, shape: MoeShape, ranks: int, dtype: torch.dtype) -> Problem:
    """Return the problem of each rank."""
    return Problem(op, shape, dtype)


class Weights(NamedTuple):
    """Weights of a rank's experts, equal for all inputs of a case."""

    gate_up: Tensor
    down: Tensor

    @staticmethod
    def random(problem: Problem, group: Group, generator: torch.Generator) -> Weights:
        """Return weights that keep the variance of the rows."""
        experts, _, hidden, intermediate = problem.model
        options = {"dtype": problem.dtype, "device": group.device}
        shape = experts // problem.ranks, 2 * intermediate, hidden
        gate_up = torch.empty(shape, **options).normal_(generator=generator)
        down = torch.empty(shape[0], hidden, intermediate, **options).normal_(generator=generator)
        return Weights(gate_up.mul_(hidden**-0.5), down.mul_(intermediate**-0.5))


@dataclass(frozen=True)
class Inputs:
    """Operands of one rank for one routing, and the expected result.

    Attributes:
        x: tokens of the rank, (tokens, hidden).
        ids, scores: experts of each token and their weights, (tokens, top_k).
        tables: order of the rank's rows.
        rows: operand of the experts or of ``combine``, (capacity, columns).
        handle: of ``dispatch``, for ``combine``.
        weights: of the rank's experts.
        result: expected result.
    """

    x: Tensor
    ids: Tensor
    scores: Tensor
    tables: Tables
    rows: Tensor
    handle: Any
    weights: Weights | None
    result: Tensor

    @staticmethod
    def random(problem: Problem, group: Group) -> Iterator[Inputs]:
        """Yield new tokens for each of the routings in turn. Collective."""
        shape, model, device = problem.shape, problem.model, group.device
        generator = torch.Generator(device).manual_seed(group.rank)
        weights = None
        if shape.flops:
            weights = Weights.random(problem, group, generator)
        number = 0
        while True:
            choices = choices_of(model, shape.tokens, shape.routing, shape.ranks, number % SETS)
            tables = Tables(*(
                t.to(device) if isinstance(t, Tensor) else t
                for t in tables_of(choices, model.experts, group.rank)
            ))  # fmt: skip
            scores = torch.rand(choices.shape, generator=torch.Generator().manual_seed(number))
            scores = (scores / scores.sum(-1, keepdim=True)).to(device)
            x = torch.empty(shape.tokens, model.hidden, dtype=problem.dtype, device=device)
            x.normal_(generator=generator)
            ids = choices.int().to(device)
            yield staged(problem, group, x, ids, scores, tables, weights)
            number += 1


def staged(
    problem: Problem, group: Group, x: Tensor, all_ids: Tensor, all_scores: Tensor, tables: Tables,
    weights: Weights | None,
) -> Inputs:  # fmt: skip
    """Return inputs with the rows that a rank's experts receive, and the expected result, by
    definition. Collective."""
    shape, rank = problem.shape, group.rank
    ids, scores = all_ids[rank], all_scores[rank]
    all_x = nccl.all_gather(x, group)
    received = x.new_zeros(shape.rows, shape.hidden)
    received[: len(tables.tokens)] = all_x[tables.tokens]
    rows, handle = received, None
    operator = OPERATORS[problem.op]
    if operator is Dispatch:
        result = received
    elif operator is Combine:
        factor = expert_factors(shape.experts, x.device)
        rows = received.clone()
        rows[: len(tables.tokens)] *= factor[tables.experts, None].to(rows.dtype)
        total = (scores * factor[ids.long()]).sum(-1, keepdim=True)
        result = x.float() * total
        _, _, handle = ops.dispatch(
            x, ids, scores, num_experts=shape.experts, capacity=shape.rows
        )  # fmt: skip
    elif operator is GroupedMatmul:
        assert weights is not None
        if shape.part == DOWN.part:
            rows = x.new_zeros(shape.rows, shape.intermediate)
            rows[: len(tables.tokens)] = swiglu(by_expert(received, weights.gate_up, tables))
        weight = weights.gate_up if shape.part == GATE_UP.part else weights.down
        result = x.new_zeros(shape.rows, weight.shape[1])
        result[: len(tables.tokens)] = by_expert(rows, weight, tables)
    else:
        assert weights is not None
        # Implementations round at different places, so this rounds nowhere.
        hidden = swiglu(by_expert(received, weights.gate_up, tables, torch.float32))
        y = by_expert(hidden, weights.down, tables, torch.float32)
        y *= all_scores.view(-1, shape.top_k)[tables.tokens, tables.choices, None]
        total = torch.zeros(all_x.shape, device=x.device).index_add_(0, tables.tokens, y)
        nccl.all_reduce(total, group)
        result = total[rank * shape.tokens :][: shape.tokens]
    return Inputs(x, ids, scores, tables, rows, handle, weights, result)


def expert_factors(experts: int, device: torch.device) -> Tensor:
    """Return what stands for the experts in ``combine``: powers of two, so that products are
    exact."""
    return 2.0 ** -(torch.arange(experts, device=device) % 3)


def by_expert(
    rows: Tensor, weight: Tensor, tables: Tables, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the rows of each expert times its weight, one expert after the other.

    Args:
        dtype: type of the products; None for that of the rows.
    """
    ends, dtype = [0, *tables.offsets.tolist()], dtype or rows.dtype
    return torch.cat([
        rows[begin:end].to(dtype) @ w.to(dtype).t()
        for begin, end, w in zip(ends, ends[1:], weight, strict=False)
    ])  # fmt: skip


def swiglu(rows: Tensor) -> Tensor:
    """Return the gate's activation times the other half of the columns."""
    gate, up = rows.chunk(2, dim=-1)
    return functional.silu(gate) * up


def choice(problem: Problem, inputs: Inputs) -> Strategy:
    """Return how our operator computes."""
    device = inputs.x.device
    if device.type == "cuda":
        return Strategy("auto", "asked for")
    return Strategy("torch", f"the tensors are on {device.type}; expected cuda")


def row_error(result: Tensor, expected: Tensor) -> Tensor:
    """Return the error of the worst row relative to the mean row, so that a single wrong row shows.
    Rows may be zero."""
    if not expected.numel():  # no token chose this rank's experts
        return torch.zeros((), device=expected.device)
    worst = (result.float() - expected).norm(dim=-1).max()
    return worst / expected.float().norm(dim=-1).mean().clamp(min=1e-30)


def arguments(problem: Problem, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the operator, as in ``Family``."""
    shape, operator = problem.shape, OPERATORS[problem.op]
    if operator is Combine:
        return (inputs.rows, inputs.handle), {}
    if operator is GroupedMatmul:
        return (inputs.rows, _weight(problem, inputs), inputs.tables.offsets), {}
    routed = inputs.x, inputs.ids, inputs.scores
    if operator is Dispatch:
        return routed, {"num_experts": shape.experts, "capacity": shape.rows}
    assert inputs.weights is not None
    return (*routed, *inputs.weights), {"capacity": shape.rows}


def _ours(buffers: Buffers) -> Implementation:
    return by_call(buffers, getattr(ops, buffers.problem.op), arguments, row_error)


def _weight(problem: Problem, inputs: Inputs) -> Tensor:
    assert inputs.weights is not None
    is_down = problem.shape.part == DOWN.part
    return inputs.weights.down if is_down else inputs.weights.gate_up


def _exchanged(inputs: Inputs, group: Group) -> Tensor:
    """Return the rows of the rank's experts by one all-to-all. Its tables were made before, so that
    the host does not wait for the numbers of rows."""
    tables = inputs.tables
    top_k = inputs.ids.shape[1]
    received = inputs.x.new_empty(len(tables.tokens), inputs.x.shape[1])
    nccl.all_to_all_rows(
        inputs.x[tables.sent // top_k], tables.sent_rows, received, tables.received_rows, group
    )
    return received[tables.order]


def _returned(inputs: Inputs, y: Tensor, group: Group) -> Tensor:
    """Return the weighted sums of the results of the rank's tokens by one all-to-all."""
    tables, shape = inputs.tables, inputs.ids.shape
    back = y.new_empty(len(tables.sent), y.shape[1])
    nccl.all_to_all_rows(
        y[tables.order.argsort()], tables.received_rows, back, tables.sent_rows, group
    )
    chosen = back[tables.sent.argsort()].view(*shape, -1)
    return torch.bmm(inputs.scores.to(y.dtype)[:, None], chosen)[:, 0]


def _torch_dispatch(buffers: Buffers) -> Implementation:
    return Implementation(
        lambda i: _exchanged(i, buffers.group),
        expected=lambda i: i.result[: len(i.tables.tokens)],
        error=row_error,
    )


def _torch_combine(buffers: Buffers) -> Implementation:
    return Implementation(
        lambda i: _returned(i, i.rows[: len(i.tables.tokens)], buffers.group), error=row_error
    )


def _torch_product(rows: Tensor, weight: Tensor, tables: Tables) -> Tensor:
    return functional.grouped_mm(rows, weight.transpose(1, 2), offs=tables.offsets)


def _torch_grouped(buffers: Buffers) -> Implementation:
    def used(inputs: Inputs, rows: Tensor) -> Tensor:
        return rows[: len(inputs.tables.tokens)]

    # torch does not define the rows after those of all experts.
    return Implementation(
        lambda i: used(i, _torch_product(i.rows, _weight(buffers.problem, i), i.tables)),
        expected=lambda i: used(i, i.result),
        error=row_error,
    )


def _torch_mlp(buffers: Buffers) -> Implementation:
    def call(inputs: Inputs) -> Tensor:
        assert inputs.weights is not None
        rows = _exchanged(inputs, buffers.group)
        hidden = swiglu(_torch_product(rows, inputs.weights.gate_up, inputs.tables))
        y = _torch_product(hidden, inputs.weights.down, inputs.tables)
        return _returned(inputs, y, buffers.group)

    return Implementation(call, error=row_error)


IMPLEMENTATIONS: dict[type[RegisteredOp], dict[str, Constructor]] = {
    Dispatch: {OURS: _ours, TORCH: _torch_dispatch},
    Combine: {OURS: _ours, TORCH: _torch_combine},
    GroupedMatmul: {OURS: _ours, TORCH: _torch_grouped},
    ExpertMlp: {OURS: _ours, TORCH: _torch_mlp},
}

FAMILY = Family(
    base=tuple(WORK),
    kind=MoeShape,
    name="moe",
    example="--shapes 8x2x64x32 --sizes 16",
    cases=cases,
    problem=problem_of,
    stage=lambda problem, group: ({}, Inputs.random(problem, group)),
    programs=lambda problem, group: (),  # compiled by the untimed iterations
    choice=choice,
    arguments=arguments,
    error=row_error,
)
