"""What operators have in common that give each rank one result of ``a @ b``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .call import call, refuse_gradients
from .groups import group_of, name_of
from .library import define
from .operators import Operator
from .prepared import prepared
from .problem import checked


def product(
    name: str, a: torch.Tensor, b: torch.Tensor, group: Any, out: torch.Tensor | None, strategy: str
) -> torch.Tensor:
    """Call an operator that ``define_product`` defined; its result, in ``out`` if given."""
    operators = torch.ops.tileweave
    if out is None:
        return getattr(operators, name)(a, b, name_of(group), strategy)
    refuse_gradients(name, a, b)
    getattr(operators, f"{name}_out")(a, b, out, name_of(group), strategy)
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
        a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, group: str, asked: str
    ) -> torch.Tensor:
        problem, ranks, choice, a, b, c = call(name, a, b, out, group, asked)
        if choice:
            prepared(ranks).operator(problem, choice, operator)(a, b, c)
        else:
            operator.unfused(a, b, c, ranks)
        return c

    def eager(a, b, group, strategy):
        return into(a, b, None, group, strategy)

    def eager_out(a, b, out, group, strategy):
        into(a, b, out, group, strategy)

    def fake(a, b, group, strategy):
        return a.new_empty(checked(name, a, b, group_of(group).world_size).shape)

    def fake_out(a, b, out, group, strategy):
        checked(name, a, b, group_of(group).world_size, out)

    options = "str group, str strategy"
    define(f"{name}(Tensor a, Tensor b, {options}) -> Tensor", eager, fake, gradient)
    define(f"{name}_out(Tensor a, Tensor b, Tensor(a!) out, {options}) -> ()", eager_out, fake_out)
