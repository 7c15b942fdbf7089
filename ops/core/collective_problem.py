"""What a collective is asked to move, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .problem import refused, require_like

Shape = tuple[int, ...]
ARGUMENT = "x"
"""How each collective calls what a rank gives."""


@dataclass(frozen=True)
class CollectiveProblem:
    """One exchange between ``ranks`` ranks; for each its steps and memory are kept.

    Attributes:
        op: the operator.
        shape, result: of what a rank gives, and gets.
        options: axes along which it is scattered and gathered, where the caller says so.
    """

    op: str
    shape: Shape
    result: Shape
    options: Shape
    ranks: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Of what a rank gives."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of what a rank gives."""
        return self.elements * self.dtype.itemsize

    @property
    def sent(self) -> int:
        """Bytes that leave each rank."""
        return sent_bytes(self.op, self.nbytes, self.ranks)

    @property
    def tile_dtype(self) -> str:
        """TileLang's name of the type."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        along = ", axes {} to {}".format(*self.options) if self.options else ""
        return f"{self.op} of {self.shape} {self.tile_dtype}{along}"


def sent_bytes(op: str, nbytes: int, ranks: int) -> int:
    """Bytes that leave each rank, as NCCL counts them for its bus bandwidth: as much as any
    algorithm sends that does not add in the network.

    Args:
        nbytes: of what a rank gives.
    """
    times = {"all_gather": ranks, "all_reduce": 2}
    return times.get(op, 1) * nbytes * (ranks - 1) // ranks


def axis_of(op: str, name: str, axis: int, x: torch.Tensor) -> int:
    """``axis`` counted from the front.

    Raises:
        TileWeaveError: there is no such axis.
    """
    if not isinstance(axis, (int, torch.SymInt)) or not -x.ndim <= axis < x.ndim:
        raise refused(op, f"{name}={axis!r}", f"an axis of {ARGUMENT} of shape {tuple(x.shape)}")
    return axis % x.ndim


def shared(op: str, x: torch.Tensor, axis: int, ranks: int) -> int:
    """The extent of each rank's part of an axis.

    Raises:
        TileWeaveError: they are not all the same.
    """
    if x.shape[axis] % ranks:
        raise refused(
            op, f"{ARGUMENT} has shape {tuple(x.shape)}",
            f"a multiple of {ranks} along axis {axis} for {ranks} ranks",
        )  # fmt: skip
    return x.shape[axis] // ranks


def require_exchangeable(op: str, x: torch.Tensor, axes: int) -> None:
    """Refuse what has nothing to exchange.

    Args:
        axes: how many x has at least.
    """
    if x.ndim < axes or 0 in x.shape:
        least = f"at least {axes} positive extents" if axes else "positive extents"
        raise refused(op, f"{ARGUMENT} has shape {tuple(x.shape)}", least)


def check_out(op: str, out: torch.Tensor, result: Sequence[int], x: torch.Tensor) -> None:
    """Refuse an ``out`` that cannot be the result."""
    if tuple(out.shape) != tuple(result):
        raise refused(op, f"out has shape {tuple(out.shape)}", f"{tuple(result)}")
    require_like(op, "out", out, ARGUMENT, x)
