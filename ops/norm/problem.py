"""Problem of an all-reduce with RMSNorm, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ..core.checks import (
    check_layout,
    refused,
    require_dense,
    require_dense_or_none,
    require_like,
    require_no_overlap,
    shares_memory,
)
from ..core.epilogue import FP8
from .kernels.all_reduce_rms_norm import QUANTIZATIONS, STATIC, WIDTH, NormConfig

NAME = "all_reduce_rms_norm"
MAX_HIDDEN = 16384
"""Maximum number of elements of a row in registers of a block."""
_DTYPES = (torch.bfloat16, torch.float16)
_INDEX_LIMIT = 1 << 31
"""Kernels number elements in int32."""


class Inputs(NamedTuple):
    """Tensors that a call reads, in the order of the programs' parameters.

    Attributes:
        x, residual: (..., hidden).
        weight, bias: (hidden,); the bias may be None.
        scale: one float32, if ``quant`` is ``fp8``; else None.
        num_tokens: one int32, the number of valid rows; None if all are.
    """

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None


@dataclass(frozen=True)
class NormProblem:
    """All-reduce with residual and RMSNorm. Its program and memory are cached per problem.

    Attributes:
        op: the operator.
        tokens, hidden: rows, and elements of a row.
        eps: added to the mean square.
        biased: whether there is a bias.
        quant: one of ``QUANTIZATIONS``, or None.
        limited: whether a tensor holds the number of valid rows.
    """

    op: str
    tokens: int
    hidden: int
    ranks: int
    dtype: torch.dtype
    eps: float
    biased: bool = False
    quant: str | None = None
    limited: bool = False

    @property
    def config(self) -> NormConfig:
        """Parameters of the programs."""
        dtype = str(self.dtype).removeprefix("torch.")
        return NormConfig(
            self.tokens, self.hidden, self.ranks, dtype, self.eps, self.biased, self.quant,
            limited=self.limited,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's rows."""
        return self.tokens * self.hidden * self.dtype.itemsize

    def obstacle(self) -> str | None:
        """Return why no program serves the problem, with what is expected; else None."""
        if self.dtype not in _DTYPES:
            return f"x is of {self.dtype}; expected {' or '.join(map(str, _DTYPES))}"
        if self.hidden % WIDTH or self.hidden > MAX_HIDDEN:
            legal = f"a multiple of {WIDTH}, at most {MAX_HIDDEN}"
            return f"rows have {self.hidden} elements; expected {legal}"
        if (elements := self.tokens * self.hidden) >= _INDEX_LIMIT:
            return f"x has {elements} elements; expected less than 2**31"
        return None

    def __str__(self) -> str:
        quant = f", {self.quant}" if self.quant else ""
        return (
            f"{self.op} of {self.tokens} tokens of {self.hidden} "
            f"{str(self.dtype).removeprefix('torch.')}, eps {self.eps}"
            f"{', with bias' * self.biased}{quant}{', num_tokens given' * self.limited}"
        )


def require_tensors(inputs: Inputs, out: Any, residual_out: Any = None) -> None:
    """Refuse arguments that are no dense tensors."""
    x, residual, weight, *others = inputs
    require_dense(NAME, x=x, residual=residual, weight=weight)
    optional = dict(zip(Inputs._fields[3:], others, strict=True))
    require_dense_or_none(NAME, **optional, out=out, residual_out=residual_out)


def checked_problem(inputs: Inputs, eps: float, quant: str | None, ranks: int) -> NormProblem:
    """Return the problem of a call whose tensors are dense.

    Raises:
        TileWeaveError: shapes, types, devices or options do not fit.
    """
    x, residual, weight, bias, scale, num_tokens = inputs
    if x.ndim < 1 or 0 in x.shape:
        raise refused(NAME, f"x has shape {tuple(x.shape)}", "(..., hidden), all positive")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise refused(NAME, f"x is of {x.dtype}", "a floating-point type of 16 bits or more")
    hidden = x.shape[-1]
    for name, tensor, shape in (
        ("residual", residual, tuple(x.shape)),
        ("weight", weight, (hidden,)),
        ("bias", bias, (hidden,)),
    ):
        if tensor is not None:
            _require_shape(name, tensor, shape, x)
            require_like(NAME, name, tensor, "x", x)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise refused(NAME, f"eps={eps!r}", "a number, at least 0")
    if quant is not None and quant not in QUANTIZATIONS:
        raise refused(NAME, f"quant={quant!r}", f"None, {', '.join(map(repr, QUANTIZATIONS))}")
    if (scale is not None) != (quant == STATIC):
        what = "scale is None" if scale is None else "scale is given"
        raise refused(NAME, f"{what}, and quant={quant!r}", f"a scale with quant={STATIC!r} only")
    if scale is not None:
        if scale.numel() != 1:
            raise refused(NAME, f"scale has shape {tuple(scale.shape)}", "one element")
        require_like(NAME, "scale", scale, "x", x, torch.float32)
    if num_tokens is not None:
        if num_tokens.numel() != 1:
            raise refused(NAME, f"num_tokens has shape {tuple(num_tokens.shape)}", "one element")
        require_like(NAME, "num_tokens", num_tokens, "x", x, torch.int32)
    tokens = prod(x.shape[:-1])
    return NormProblem(
        NAME, tokens, hidden, ranks, x.dtype, float(eps), bias is not None, quant,
        num_tokens is not None,
    )  # fmt: skip


def _require_shape(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor
) -> None:
    if tuple(tensor.shape) != shape:
        expected = f"{shape} for x of shape {tuple(x.shape)}"
        raise refused(NAME, f"{name} has shape {tuple(tensor.shape)}", expected)


def check_results(
    inputs: Inputs, quant: str | None, out: torch.Tensor, residual_out: torch.Tensor
) -> None:
    """Refuse results of a wrong shape, type or device."""
    x = inputs.x
    for name, tensor, dtype in (
        ("out", out, FP8 if quant is not None else x.dtype),
        ("residual_out", residual_out, x.dtype),
    ):
        _require_shape(name, tensor, tuple(x.shape), x)
        require_like(NAME, name, tensor, "x", x, dtype)


def check_memory(inputs: Sequence[Any], out: torch.Tensor, residual_out: Any) -> None:
    """Refuse results that kernels cannot write, and results that overlap each other or an argument,
    except that each may be x or residual if it has the same type: a row is read before it is
    written."""
    check_layout(NAME, out, "out")
    check_layout(NAME, residual_out, "residual_out")
    if shares_memory(out, residual_out):
        raise refused(NAME, "out shares memory with residual_out", "memory of its own")
    x, residual, *others = inputs
    names = Inputs._fields[2:]
    for name, result in (("out", out), ("residual_out", residual_out)):
        for argument, tensor in (("x", x), ("residual", residual)):
            in_place = result.data_ptr() == tensor.data_ptr() and result.dtype == tensor.dtype
            if not in_place and shares_memory(result, tensor):
                raise refused(
                    NAME,
                    f"{name} shares memory with {argument}",
                    "the same tensor, or other memory",
                )
        require_no_overlap(NAME, result, name, **dict(zip(names, others, strict=True)))
