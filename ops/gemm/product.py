"""Registration of operators that return one result of ``a @ b`` on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import compute, refuse_gradients
from ..core.epilogue import SCHEMA, Epilogue
from ..core.groups import group_of, name_of
from ..core.library import define
from ..core.operator import Operator
from ..core.problem import checked, require_operands

_DEFINED: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., None]]] = {}
"""Registered functions by name: one that returns a new result, and one that writes to ``out``."""


def product(
    name: str, a: torch.Tensor, b: torch.Tensor, group: Any, out: torch.Tensor | None,
    strategy: str, epilogue: Epilogue,
) -> torch.Tensor:  # fmt: skip
    """Call an operator that ``define_product`` registered. Return its result, in ``out`` if
    given."""
    require_operands(name, a, b, out, epilogue)
    refuse_gradients(name, out, a, b, *epilogue.tensors)
    into_new, into_out = _DEFINED[name]
    if out is None:
        return into_new(a, b, name_of(group), strategy, *epilogue)
    into_out(a, b, out, name_of(group), strategy, *epilogue)
    return out


def define_product(operator: type[Operator]) -> None:
    """Register an operator as ``torch.ops.tileweave.name``, and as ``name_out``, which has no
    gradient."""
    name = operator.op

    def eager(a, b, group, strategy, *epilogue):
        return compute(name, a, b, None, group, strategy, Epilogue(*epilogue))

    def eager_out(a, b, out, group, strategy, *epilogue):
        compute(name, a, b, out, group, strategy, Epilogue(*epilogue))

    def fake(a, b, group, strategy, *epilogue):
        ranks = group_of(group).world_size
        problem = checked(name, a, b, ranks, None, Epilogue(*epilogue))
        return a.new_empty(problem.shape, dtype=problem.out_dtype)

    def fake_out(a, b, out, group, strategy, *epilogue):
        checked(name, a, b, group_of(group).world_size, out, Epilogue(*epilogue))

    options = f"str group, str strategy, {SCHEMA}"
    schema_out = f"{name}_out(Tensor a, Tensor b, Tensor(a!) out, {options}) -> ()"
    schema = f"{name}(Tensor a, Tensor b, {options}) -> Tensor"
    _DEFINED[name] = (
        define(schema, eager, fake, (_save, operator.gradients)),
        define(schema_out, eager_out, fake_out),
    )


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.strategy, *_ = inputs
    ctx.save_for_backward(a, b)
