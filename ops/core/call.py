"""Calls of GEMM operators: check, decide, compile, run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ...runtime.host.group import Group
from ...runtime.kernel.kernel import capturing
from ..autotune.store import lookup
from ..autotune.tuner import choice_of
from .cache import prepared
from .epilogue import FP8, NOTHING, Epilogue
from .fast_path import record_fast_path, repeat
from .groups import group_of, name_of
from .operator import Choice, Operator
from .problem import (
    Problem,
    agree,
    check_layout,
    checked,
    laid_out,
    operator_name,
    packed,
    refused,
    require_apart_from_operands,
    require_operands,
)
from .registry import OPERATORS, operators_of
from .session_cache import SessionCache, signature
from .strategy import Strategy, chosen, not_fused


class Decision(NamedTuple):
    """Decision about a call: what it computes, on which ranks and how.

    Attributes:
        choice: program and tiles of the fused kernel; None for NCCL and cuBLAS.
    """

    problem: Problem
    group: Group
    choice: Choice | None


_decisions: SessionCache[Decision] = SessionCache()


class Call(NamedTuple):
    """Checked call that is ready to run: operands that kernels can read, and memory for c."""

    problem: Problem
    group: Group
    choice: Choice | None
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    epilogue: Epilogue

    def operator(self, choice: Choice) -> Operator:
        """Return the operator for ``choice``. Collective if it is new."""
        make = OPERATORS[self.problem.op]
        return prepared(self.group).operator(self.problem, choice, make)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """Inputs of the ``Operator`` except c."""
        return self.a, self.b, *self.epilogue.tensors


def compute(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue = NOTHING,
) -> torch.Tensor:  # fmt: skip
    """Return the result of a call, in ``out`` if given. Collective for each new problem.

    Args:
        out, group, asked: as in ``call``.
    """
    if out is not None:
        require_apart_from_operands(op, out, a, b, epilogue)
    key = _key(op, a, b, out, group, asked, epilogue)
    inputs = a, b, *epilogue.tensors
    if (c := repeat(key, inputs, out)) is not None:
        return c
    request = _call(key, op, a, b, out, group, asked, epilogue)
    if request.choice is None:
        OPERATORS[op].unfused(request.a, request.b, request.c, request.group, request.epilogue)
        return request.c
    operator = request.operator(request.choice)
    a, b, *rest = request.operands
    operator(a, b, request.c, *rest)
    declared = operator.declared(a, b, request.c, *rest)
    record_fast_path(key, inputs, prepared(request.group), operator, *declared, request.c)
    return request.c


def call(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue = NOTHING,
) -> Call:  # fmt: skip
    """Check a call and decide how to compute it. Collective for each new problem.

    Args:
        out: tensor for the result; None for a new one.
        group: name of the group.
        asked: the strategy that the caller asks for.
    """
    if out is not None:
        require_apart_from_operands(op, out, a, b, epilogue)
    key = _key(op, a, b, out, group, asked, epilogue)
    return _call(key, op, a, b, out, group, asked, epilogue)


def _key(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue,
) -> Hashable:  # fmt: skip
    *tensors, out_dtype = epilogue
    signatures = [signature(t) for t in (a, b, out, *tensors)]
    return (op, group, asked, out_dtype, *signatures)


def _call(
    key: Hashable, op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str,
    asked: str, epilogue: Epilogue,
) -> Call:  # fmt: skip
    if out is not None:
        check_layout(op, out)
    decision = _decisions.get(key)
    if decision is None:
        decision, cacheable = _decided(op, a, b, out, group, asked, epilogue)
        if cacheable and not capturing():
            _decisions.put(key, decision)
    problem = decision.problem
    a, b, epilogue = laid_out(problem, a, b, epilogue)
    c = a.new_empty(problem.shape, dtype=problem.out_dtype) if out is None else packed(out)
    return Call(*decision, a, b, c, epilogue)


def _decided(
    op: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
    epilogue: Epilogue,
) -> tuple[Decision, bool]:  # fmt: skip
    """Decide a call. The second value says whether the decision may be cached: the obstacles that
    keep a problem from being fused may change, other decisions hold until the next tuning or
    session."""
    ranks = group_of(group)
    problem = checked(op, a, b, ranks.world_size, out, epilogue)
    other = not_fused(asked, problem, a.device, ranks)
    agree(ranks, problem, other.name if other else asked)
    choice = None if other else choice_of(asked, problem, ranks)
    return Decision(problem, ranks, choice), other is None


def refuse_gradients(op: str, out: torch.Tensor | None, *tensors: torch.Tensor) -> None:
    """Refuse gradients through ``out``, as torch does, and through fp8 products."""
    if out is not None and out.requires_grad and torch.is_grad_enabled():
        raise refused(op, "out requires a gradient", "one that does not, or torch.no_grad()")
    if out is not None:
        why = "out is given"
    elif tensors[0].dtype == FP8:
        why = f"the operands are of {FP8}"
    else:
        return
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise refused(
            op, f"{why} and an argument requires a gradient", "one of both, or torch.no_grad()"
        )


def strategy_of(
    op: Any, a: torch.Tensor, b: torch.Tensor, group: Any = None, strategy: str = "auto",
    *, bias: torch.Tensor | None = None, scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Strategy:  # fmt: skip
    """Return the strategy that a call would use, and the reason. Nothing is computed.

    Args:
        op: the operator, such as ``ops.matmul_reduce_scatter``, or its name.
        a, b, group, strategy, bias, scale_a, scale_b, out_dtype: arguments of the operator.
    """
    name, ranks = operator_name("strategy_of", op, operators_of(Operator)), group_of(name_of(group))
    epilogue = Epilogue(bias, scale_a, scale_b, out_dtype)
    require_operands(name, a, b, None, epilogue)
    problem = checked(name, a, b, ranks.world_size, None, epilogue)
    return chosen(strategy, problem, a.device, ranks, lookup(problem, ranks))
