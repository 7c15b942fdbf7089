"""Registration of operators that return one result of ``a @ b`` on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.call import compute, refuse_gradients
from ..core.epilogue import SCHEMA, Epilogue
from ..core.groups import group_of, name_of
from ..core.library import define
from ..core.problem import checked, require_operands


def define_product(name: str, gradients: Callable[..., tuple]) -> Callable[..., torch.Tensor]:
    """Define ``torch.ops.tileweave.name``, and ``name_out``, which has no gradient.

    Args:
        name: name of an ``Operator``.
        gradients: function from ``ctx`` and the gradient of the result to the gradients of the
            arguments; ``ctx`` has saved a and b, and holds ``group`` and ``strategy``.

    Returns:
        A function that calls either: ``(a, b, group, out, strategy, epilogue) -> result``.
    """

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
    into_new = define(schema, eager, fake, (_save, gradients))
    into_out = define(schema_out, eager_out, fake_out)

    def product(
        a: torch.Tensor, b: torch.Tensor, group: Any, out: torch.Tensor | None, strategy: str,
        epilogue: Epilogue,
    ) -> torch.Tensor:  # fmt: skip
        require_operands(name, a, b, out, epilogue)
        refuse_gradients(name, out, a, b, *epilogue.tensors)
        if out is None:
            return into_new(a, b, name_of(group), strategy, *epilogue)
        into_out(a, b, out, name_of(group), strategy, *epilogue)
        return out

    return product


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    a, b, ctx.group, ctx.strategy, *_ = inputs
    ctx.save_for_backward(a, b)
