"""Count of the calls of torch's operators that the integration implements, and how each kind of
call is computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...builtins.errors import TileWeaveError
from ...ops import Strategy


@dataclass
class CallKind:
    """Calls of an operator with equal shapes, strides, types and options.

    Attributes:
        name: the operator in ``torch.ops.symm_mem``, or an implementation of attention.
        shapes: shapes of the activations and of the weights, or of q, k and v.
        dtype: type of the activations, or of q.
        strategy: strategy of TileWeave's operator, with the reason, in the first call; None if
            torch's own implementation computes the calls.
        obstacle: why TileWeave's operator does not accept the calls; else None.
        count: the number of calls.
    """

    name: str
    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    strategy: Strategy | None
    obstacle: str | None
    count: int = 0

    def __str__(self) -> str:
        shapes = " x ".join(map(str, self.shapes))
        how = f"torch's own implementation: {self.obstacle}"
        if self.strategy is not None:
            how = str(self.strategy)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.count} x {self.name} of {shapes} in {dtype}: {how}"


_kinds: dict[Hashable, CallKind] = {}


def accepted(
    name: str, operands: Sequence[Tensor], others: Sequence[Tensor | None], options: tuple,
    strategy: Callable[[], Strategy],
) -> bool:  # fmt: skip
    """Count a call. Return whether TileWeave's operator accepts it.

    Args:
        operands: activations and weights, or q, k and v.
        others: biases and scales.
        options: other arguments on which the decision depends.
        strategy: returns the strategy of TileWeave's operator. It raises TileWeaveError if the
            operator does not accept the call. It runs in the first call of a kind only.
    """
    memory = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device.type)
        for t in (*operands, *others)
    ]
    key = name, *options, *memory
    kind = _kinds.get(key)
    if kind is None:
        chosen = obstacle = None
        try:
            chosen = strategy()
        except TileWeaveError as error:
            obstacle = str(error)
        shapes = [tuple(t.shape) for t in operands]
        kind = _kinds[key] = CallKind(name, shapes, operands[0].dtype, chosen, obstacle)
    kind.count += 1
    return kind.obstacle is None


def kinds() -> list[CallKind]:
    """Return all kinds of calls since ``clear``."""
    return list(_kinds.values())


def clear() -> None:
    """Forget all calls."""
    _kinds.clear()
