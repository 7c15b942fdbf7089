"""What every operator does before it multiplies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..builtins.errors import TileWeaveError
from ..runtime.group import Group
from ..runtime.kernel import capturing
from .epilogue import NOTHING, Epilogue
from .groups import group_of, name_of
from .measured import looked_up
from .operators import Choice
from .problem import Problem, agree, check_layout, checked, laid_out
from .remembered import recalled, remember, signature
from .strategy import Strategy, chosen
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
    key = (op, group, asked, *(signature(tensor) for tensor in (a, b, out, *epilogue)))
    decision = recalled(key)
    if decision is None:
        decision = _decided(op, a, b, out, group, asked, epilogue)
        if decision.choice is not None and not capturing():
            remember(key, decision)
    a, b, epilogue = laid_out(decision.problem, a, b, epilogue)
    c = a.new_empty(decision.problem.shape) if out is None else out
    return Call(*decision, a, b, c, epilogue)


def _decided(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue,
) -> Decision:  # fmt: skip
    ranks = group_of(group)
    problem = checked(op, a, b, ranks.world_size, out, epilogue)
    strategy = chosen(asked, problem, a.device, ranks).name
    agree(ranks, problem, strategy if strategy == "nccl" else asked)
    choice = choice_of(asked, problem, ranks) if strategy == "fused" else None
    return Decision(problem, ranks, choice)


def refuse_gradients(op: str, *tensors: torch.Tensor) -> None:
    """``out`` is not differentiable, as in torch."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise TileWeaveError(
            f"{op}: out is given and an argument requires a gradient; expected one of both, or "
            "torch.no_grad()"
        )


def strategy_of(
    op: Any, a: torch.Tensor, b: torch.Tensor, group: Any = None, strategy: str = "auto",
    *, bias: torch.Tensor | None = None,
) -> Strategy:  # fmt: skip
    """How an operator would compute a call, and why; nothing is computed.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``.
        a, b, group, strategy, bias: as it would get them.
    """
    ranks = group_of(name_of(group))
    problem = checked(op.__name__, a, b, ranks.world_size, None, Epilogue(bias))
    return chosen(strategy, problem, a.device, ranks, looked_up(problem, ranks))
