"""What every operator does before it multiplies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.group import Group
from ..runtime.kernel import capturing
from .epilogue import FP8, NOTHING, Epilogue
from .groups import group_of, name_of
from .measured import looked_up
from .operators import Choice
from .problem import Problem, agree, check_layout, checked, laid_out, refused
from .remembered import recalled, remember, signature
from .strategy import Strategy, chosen, not_fused
from .tuner import choice_of


class Decision(NamedTuple):
    """What a call computes, with whom and how.

    Attributes:
        choice: how it is fused; None for NCCL and cuBLAS.
    """

    problem: Problem
    group: Group
    choice: Choice | None


class Call(NamedTuple):
    """A checked call, ready to be computed: operands as kernels can read them, and memory for c."""

    problem: Problem
    group: Group
    choice: Choice | None
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    epilogue: Epilogue


def call(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue = NOTHING,
) -> Call:  # fmt: skip
    """Check everything. Collective for each new problem.

    Args:
        out: where the result shall be, if not in new memory.
        group: its name.
        asked: the strategy.
    """
    if out is not None:
        check_layout(op, out)
    *tensors, out_dtype = epilogue
    key = (op, group, asked, out_dtype, *(signature(t) for t in (a, b, out, *tensors)))
    decision: Decision | None = recalled(key)
    if decision is None:
        decision, lasts = _decided(op, a, b, out, group, asked, epilogue)
        if lasts and not capturing():
            remember(key, decision)
    problem = decision.problem
    a, b, epilogue = laid_out(problem, a, b, epilogue)
    c = a.new_empty(problem.shape, dtype=problem.out_dtype) if out is None else out
    return Call(*decision, a, b, c, epilogue)


def _decided(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue,
) -> tuple[Decision, bool]:  # fmt: skip
    """With whether it holds until somebody tunes, or begins a session: what keeps a problem from
    being fused may change."""
    ranks = group_of(group)
    problem = checked(op, a, b, ranks.world_size, out, epilogue)
    other = not_fused(asked, problem, a.device, ranks)
    agree(ranks, problem, other.name if other else asked)
    choice = None if other else choice_of(asked, problem, ranks)
    return Decision(problem, ranks, choice), other is None


def refuse_gradients(op: str, out: torch.Tensor | None, *tensors: torch.Tensor) -> None:
    """``out`` is not differentiable, as in torch; nor are products of fp8."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return
    whys = {"out is given": out is not None, f"the operands are of {FP8}": tensors[0].dtype == FP8}
    for why, holds in whys.items():
        if holds:
            raise refused(
                op, f"{why} and an argument requires a gradient", "one of both, or torch.no_grad()"
            )


def strategy_of(
    op: Any, a: torch.Tensor, b: torch.Tensor, group: Any = None, strategy: str = "auto",
    *, bias: torch.Tensor | None = None, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Strategy:  # fmt: skip
    """How an operator would compute a call, and why; nothing is computed.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``.
        a, b, group, strategy, bias, scale_a, scale_b, out_dtype: as it would get them.
    """
    ranks = group_of(name_of(group))
    problem = checked(
        op.__name__, a, b, ranks.world_size, None, Epilogue(bias, scale_a, scale_b, out_dtype)
    )
    return chosen(strategy, problem, a.device, ranks, looked_up(problem, ranks))
