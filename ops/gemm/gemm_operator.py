"""Calls of GEMM operators, and their functions in ``torch.ops.tileweave``."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...builtins.errors import brief_errors
from ..autotune.cost_model import estimate_unfused_us
from ..autotune.store import lookup
from ..autotune.tuner import choice_of
from ..core.across_nodes import Mesh, readable, writable
from ..core.agreement import agree
from ..core.autocast import as_autocast, lowers
from ..core.call import Call, Decision, compute
from ..core.checks import check_layout, operator_name, require_no_overlap, with_packed_strides
from ..core.epilogue import EPILOGUE_SCHEMA, Epilogue
from ..core.groups import TwoLevels, name_of, ranks_of
from ..core.library import define_pair, refuse_gradients
from ..core.operator import Multiply, Operator
from ..core.problem import (
    Problem,
    as_kernel_operands,
    checked_problem,
    require_operands,
)
from ..core.registry import OPERATORS, operators_of
from ..core.strategy import Strategy, choose_strategy, unfused_gemm_strategy


class GemmOperator(Operator, ABC):
    """Calls of a GEMM operator. Their inputs are a, b, bias, scale_a and scale_b, and their
    options group, strategy and type of the result."""

    group_at, guarded = 0, 3

    @classmethod
    def predicted(cls, problem: Problem) -> tuple[float, float]:
        """Return the estimated times in us of ``table`` and ``unfused``."""
        sizes = problem.M, problem.N, problem.K, problem.moved_bytes
        return min(cls.options(problem).values()), estimate_unfused_us(*sizes, problem.itemsize)

    @classmethod
    def decide(cls, call: Call) -> Decision:
        """Check a call, and decide how to compute it. The obstacles that keep a problem from being
        fused may change, other decisions hold until the next tuning or session."""
        a, b, epilogue = arguments_of(call)
        require_operands(cls.op, a, b, call.out, epilogue)
        if call.out is not None:
            cls.check_memory(call.inputs, call.out, ())
            check_layout(cls.op, call.out)
        ranks = ranks_of(call.group)
        problem = checked_problem(cls.op, a, b, ranks.world_size, call.out, epilogue)
        if isinstance(ranks, TwoLevels):
            part = cls.within(problem, ranks)
            unfused_gemm_strategy(call.requested, replace(part, op=cls.op), a.device, ranks.node)
            agree(ranks, problem, call.requested)
            return Decision(problem, ranks, None)
        unfused = unfused_gemm_strategy(call.requested, problem, a.device, ranks)
        agree(ranks, problem, unfused.name if unfused else call.requested)
        choice = None if unfused else choice_of(call.requested, problem, ranks)
        return Decision(problem, ranks, choice, is_lasting=unfused is None)

    @classmethod
    def check_memory(
        cls, inputs: Sequence[Any], out: torch.Tensor, results: Sequence[torch.Tensor | None]
    ) -> None:
        named = zip((*cls.arguments, "bias"), inputs[: cls.guarded], strict=True)
        require_no_overlap(cls.op, out, **dict(named))

    @classmethod
    def compute_unfused(cls, call: Call, decision: Decision) -> torch.Tensor:
        a, b, epilogue, c = operands_of(call, decision)
        ranks, requested = decision.group, call.requested
        if not isinstance(ranks, TwoLevels):
            cls.unfused(a, b, c, ranks, epilogue)
            return c
        transport = "nccl" if requested == "nccl" else "auto"
        move = cls.collective.in_node(ranks, transport)
        with Mesh.of(cls.op, ranks, a.device) as mesh:
            cls.across(_in_node(ranks, requested), move, a, b, c, epilogue, mesh)
        return c

    @classmethod
    def prepared(
        cls, call: Call, decision: Decision
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        a, b, epilogue, c = operands_of(call, decision)
        return (a, b, *epilogue.tensors), c


def arguments_of(call: Call) -> tuple[torch.Tensor, torch.Tensor, Epilogue]:
    """Return the arguments of a GEMM."""
    a, b, *tensors = call.inputs
    return a, b, Epilogue(*tensors, call.options[-1])


def operands_of(
    call: Call, decision: Decision
) -> tuple[torch.Tensor, torch.Tensor, Epilogue, torch.Tensor]:
    """Return the arguments of a GEMM as kernels can read them, and memory for the result."""
    problem, out = decision.problem, call.out
    a, b, epilogue = as_kernel_operands(problem, *arguments_of(call))
    if out is not None:
        return a, b, epilogue, with_packed_strides(out)
    return a, b, epilogue, a.new_empty(problem.shape, dtype=problem.out_dtype)


def _in_node(ranks: TwoLevels, requested: str) -> Multiply:
    """Return the function that calls operators of the ranks of this node, on tensors of any
    alignment."""

    def multiply(operator: type[Operator], a, b, out, epilogue: Epilogue) -> None:
        *tensors, out_dtype = epilogue
        options = ranks.node_name, requested, out_dtype
        with writable(out) as memory:
            compute(operator.op, (readable(a), b, *tensors), memory, options)

    return multiply


@brief_errors
def strategy_of(
    op: Any, a: torch.Tensor, b: torch.Tensor, group: Any = None, strategy: str = "auto",
    *, bias: torch.Tensor | None = None, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Strategy:  # fmt: skip
    """Return the strategy that a call would use, and the reason. Nothing is computed.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``, or its name.
        a, b, group, strategy, bias, scale_a, scale_b, out_dtype: arguments of the operator.

    Returns:
        The strategy; on several nodes, the one within a node.
    """
    name, ranks = operator_name("strategy_of", op, operators_of(Operator)), ranks_of(name_of(group))
    require_operands(name, a, b, None, Epilogue(bias, scale_a, scale_b, out_dtype))
    a, b, bias = as_autocast(a, b, bias)
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    problem = checked_problem(name, a, b, ranks.world_size, None, epilogue)
    if isinstance(ranks, TwoLevels):
        problem, ranks = OPERATORS[name].within(problem, ranks), ranks.node
    return choose_strategy(strategy, problem, a.device, ranks, lookup(problem, ranks))


def define_gemm(operator: type[Operator]) -> None:
    """Register ``torch.ops.tileweave.name``, which returns one result of ``a @ b`` on each rank,
    and ``name_out``, which has no gradient."""
    name = operator.op

    def fake(inputs, out, options):
        (a, b, *tensors), (group, _, out_dtype) = inputs, options
        epilogue = Epilogue(*tensors, out_dtype)
        problem = checked_problem(name, a, b, ranks_of(group).world_size, out, epilogue)
        return a.new_empty(problem.shape, dtype=problem.out_dtype) if out is None else None

    def check(inputs, out, options):
        a, b, *tensors = inputs
        epilogue = Epilogue(*tensors, options[-1])
        require_operands(name, a, b, out, epilogue)
        refuse_gradients(name, out, a, b, *epilogue.tensors)

    define_pair(
        name, "Tensor a, Tensor b", f"str group, str strategy, {EPILOGUE_SCHEMA}",
        partial(compute, name), fake, check, gradient=(_save, operator.gradients),
        casts=lowers("a", "b", "bias"),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.strategy, *_ = inputs
    ctx.save_for_backward(a, b)
