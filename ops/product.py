"""What operators have in common that give each rank one result of ``a @ b``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .call import call, refuse_gradients
from .epilogue import SCHEMA, Epilogue
from .groups import group_of, name_of
from .library import define
from .operators import Operator
from .prepared import prepared
from .problem import checked


def product(
    name: str, a: torch.Tensor, b: torch.Tensor, group: Any, out: torch.Tensor | None,
    strategy: str, epilogue: Epilogue,
) -> torch.Tensor:  # fmt: skip
    """Call an operator that ``define_product`` defined; its result, in ``out`` if given."""
    operators = torch.ops.tileweave
    refuse_gradients(name, out, a, b, *epilogue.tensors)
    if out is None:
        return getattr(operators, name)(a, b, name_of(group), strategy, *epilogue)
    getattr(operators, f"{name}_out")(a, b, out, name_of(group), strategy, *epilogue)
    return out


def define_product(
    name: str,
    operator: type[Operator],
    gradient: tuple[Callable[..., None], Callable[..., Any]],
) -> None:
    """``torch.ops.tileweave.name``, and ``name_out``, which has no gradient.

    Args:
        gradient: as for ``define``.
    """

    def into(
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str,
        *epilogue: Any,
    ) -> torch.Tensor:  # fmt: skip
        problem, ranks, choice, a, b, c, more = call(
            name, a, b, out, group, asked, Epilogue(*epilogue)
        )
        if choice:
            prepared(ranks).operator(problem, choice, operator)(a, b, c, *more.tensors)
        else:
            operator.unfused(a, b, c, ranks, more)
        return c

    def eager(a, b, group, strategy, *epilogue):
        return into(a, b, None, group, strategy, *epilogue)

    def eager_out(a, b, out, group, strategy, *epilogue):
        into(a, b, out, group, strategy, *epilogue)

    def fake(a, b, group, strategy, *epilogue):
        ranks = group_of(group).world_size
        problem = checked(name, a, b, ranks, None, Epilogue(*epilogue))
        return a.new_empty(problem.shape, dtype=problem.out_dtype)

    def fake_out(a, b, out, group, strategy, *epilogue):
        checked(name, a, b, group_of(group).world_size, out, Epilogue(*epilogue))

    options = f"str group, str strategy, {SCHEMA}"
    define(f"{name}(Tensor a, Tensor b, {options}) -> Tensor", eager, fake, gradient)
    define(f"{name}_out(Tensor a, Tensor b, Tensor(a!) out, {options}) -> ()", eager_out, fake_out)
