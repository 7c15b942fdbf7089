"""Problem of a collective, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .checks import refused, require_like
from .registry import OPERATORS

Shape = tuple[int, ...]
ARGUMENT = "x"
"""Name of the input in all collectives."""


@dataclass(frozen=True)
class CollectiveProblem:
    """Collective operation among ``ranks`` ranks. Its program and memory are cached per problem.

    Attributes:
        op: the operator.
        shape, result: shapes of a rank's input and result.
        options: integer arguments of the call, in canonical form, such as axes.
    """

    op: str
    shape: Shape
    result: Shape
    options: Shape
    ranks: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements of a rank's input."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's input."""
        return self.elements * self.dtype.itemsize

    @property
    def result_nbytes(self) -> int:
        """Bytes of a rank's result."""
        return prod(self.result) * self.dtype.itemsize

    @property
    def bytes_sent(self) -> int:
        """Bytes that each rank sends."""
        return OPERATORS[self.op].sent_bytes(self.nbytes, self.ranks)

    @property
    def tile_dtype(self) -> str:
        """Type in TileLang's spelling."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        options = OPERATORS[self.op].options_format.format(*self.options)
        return f"{self.op} of {self.shape} {self.tile_dtype}{options}"


def axis_of(op: str, name: str, axis: int, x: torch.Tensor) -> int:
    """Return ``axis`` counted from the front.

    Raises:
        TileWeaveError: there is no such axis.
    """
    if not isinstance(axis, (int, torch.SymInt)) or not -x.ndim <= axis < x.ndim:
        raise refused(op, f"{name}={axis!r}", f"an axis of {ARGUMENT} of shape {tuple(x.shape)}")
    return axis % x.ndim


def extent_per_rank(op: str, x: torch.Tensor, axis: int, ranks: int) -> int:
    """Return the extent of each rank's part of an axis.

    Raises:
        TileWeaveError: ``ranks`` does not divide the axis.
    """
    if x.shape[axis] % ranks:
        raise refused(
            op, f"{ARGUMENT} has shape {tuple(x.shape)}",
            f"a multiple of {ranks} along axis {axis} for {ranks} ranks",
        )  # fmt: skip
    return x.shape[axis] // ranks


def require_exchangeable(op: str, x: torch.Tensor, axes: int) -> None:
    """Refuse a tensor with too few axes or without elements.

    Args:
        axes: least number of axes.
    """
    if x.ndim < axes or 0 in x.shape:
        legal = f"at least {axes} positive extents" if axes else "positive extents"
        raise refused(op, f"{ARGUMENT} has shape {tuple(x.shape)}", legal)


def check_out(op: str, out: torch.Tensor, result: Sequence[int], x: torch.Tensor) -> None:
    """Refuse an ``out`` of another shape, type or device than the result."""
    if tuple(out.shape) != tuple(result):
        raise refused(op, f"out has shape {tuple(out.shape)}", f"{tuple(result)}")
    require_like(op, "out", out, ARGUMENT, x)
