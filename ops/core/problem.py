"""Problem of a GEMM operator, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...builtins.errors import TileWeaveError
from .checks import (
    ALIGNMENT,
    as_kernel_operand,
    is_dense,
    refused,
    require_dense,
    require_dense_or_none,
    require_like,
)
from .epilogue import FP8, NO_EPILOGUE, Epilogue
from .registry import OPERATORS

_FP8_RESULTS = (torch.bfloat16, torch.float16)
"""Result types of fp8 products; the first is the default."""


@dataclass(frozen=True)
class Problem:
    """GEMM of ``ranks`` ranks. Its kernel and memory are cached per problem.

    Attributes:
        op: name of the operator.
        rows: rows of the rank's first operand.
        N, K: columns of the rank's result and its inner dimension.
        transposed: whether b is stored as (N, K), else as (K, N).
        biased: whether a bias is added.
        result: type of the result; None for that of the operands.
    """

    op: str
    rows: int
    N: int
    K: int
    ranks: int
    dtype: torch.dtype
    transposed: bool
    biased: bool = False
    result: torch.dtype | None = None

    @property
    def gathers(self) -> bool:
        """True if the operator multiplies the rows of all ranks."""
        return OPERATORS[self.op].gathers

    @property
    def scatters(self) -> bool:
        """True if each rank receives some rows of the result."""
        return OPERATORS[self.op].scatters

    @property
    def M(self) -> int:
        """Rows of the product."""
        return self.rows * self.ranks if self.gathers else self.rows

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank owns of what is gathered or scattered."""
        return self.M // self.ranks

    @property
    def itemsize(self) -> int:
        """Bytes of an operand's element."""
        return self.dtype.itemsize

    @property
    def shards(self) -> tuple[int, int, int]:
        """Rows and columns of a shard of the product, and the number of shards. No tile crosses the
        rows of a shard."""
        if self.gathers or self.scatters:
            return self.rows_per_rank, self.N, self.ranks
        return self.M, self.N, 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a rank's result."""
        return (self.rows_per_rank if self.scatters else self.M), self.N

    @property
    def tile_dtype(self) -> str:
        """Type of the operands in TileLang's spelling."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def scaled(self) -> bool:
        """True if operands are fp8, which have scales."""
        return self.dtype == FP8

    @property
    def out_dtype(self) -> torch.dtype:
        """Type of the result, of the bias, and of the partial sums that ranks send."""
        return self.result or self.dtype

    @property
    def moved_bytes(self) -> int:
        """Bytes that each rank must receive from the others."""
        if self.gathers:
            nbytes = self.rows * self.K * self.itemsize
        else:
            nbytes = self.M * self.N * self.out_dtype.itemsize
        return OPERATORS[self.op].collective.sent_bytes(nbytes, self.ranks)

    @property
    def tile_out_dtype(self) -> str:
        """Type of the result in TileLang's spelling."""
        return str(self.out_dtype).removeprefix("torch.")

    def stored(self, b: torch.Tensor) -> torch.Tensor:
        """Return b as it is stored in memory, (N, K) or (K, N). It is its own inverse."""
        return b.t() if self.transposed else b

    def __str__(self) -> str:
        order = "transposed " if self.transposed else ""
        return (
            f"{self.op} of ({self.rows}, {self.K}) x {order}({self.K}, {self.N}) {self.tile_dtype}"
            f"{f' to {self.tile_out_dtype}' if self.result else ''}{' with bias' * self.biased}"
        )


def checked_problem(
    op: str, a: torch.Tensor, b: torch.Tensor, ranks: int, out: torch.Tensor | None = None,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Problem:  # fmt: skip
    """Return the problem of a call.

    Raises:
        TileWeaveError: shapes, types or devices do not fit.
    """
    first, second = OPERATORS[op].arguments
    for name, tensor in ((first, a), (second, b)):
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise refused(op, f"{name} has shape {_shape(tensor)}", "two positive extents")
        if not tensor.is_floating_point():
            raise refused(op, f"{name} is of {tensor.dtype}", "a floating-point type")
    (rows, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise refused(
            op, f"{second} has shape {_shape(b)}", f"({K}, N) for {first} of shape {_shape(a)}"
        )
    require_like(op, second, b, first, a)
    transposed = not b.is_contiguous() and b.t().is_contiguous()
    result = result_of(op, a.dtype, epilogue.out_dtype)
    biased = epilogue.bias is not None
    problem = Problem(op, rows, N, K, ranks, a.dtype, transposed, biased, result)
    _check_scales(problem, a, epilogue)
    if problem.scaled and (obstacle := fp8_obstacle(problem)):
        raise TileWeaveError(f"{op}: {obstacle}")
    if problem.scatters and rows % ranks:
        raise refused(
            op, f"{first} has shape {_shape(a)}", f"a multiple of {ranks} rows for {ranks} ranks"
        )
    for name, tensor, shape in (("bias", epilogue.bias, (N,)), ("out", out, problem.shape)):
        if tensor is not None:
            if _shape(tensor) != shape:
                raise refused(op, f"{name} has shape {_shape(tensor)}", f"{shape}")
            require_like(op, name, tensor, first, a, problem.out_dtype)
    return problem


def result_of(
    op: str, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> torch.dtype | None:
    """Return ``Problem.result`` for operands of ``dtype`` if the caller asks for ``out_dtype``.

    Raises:
        TileWeaveError: no GEMM has these types.
    """
    first = OPERATORS[op].arguments[0]
    if dtype == FP8:
        if out_dtype not in (None, *_FP8_RESULTS):
            legal = " or ".join(map(str, _FP8_RESULTS))
            raise refused(op, f"out_dtype={out_dtype}", f"{legal} for {first} of {dtype}")
        return out_dtype or _FP8_RESULTS[0]
    if dtype.itemsize == 1:
        raise refused(op, f"{first} is of {dtype}", f"{FP8}, or a type of 16 bits or more")
    if out_dtype not in (None, dtype):
        raise refused(op, f"out_dtype={out_dtype}", f"{dtype} as {first}")
    return None


def _check_scales(problem: Problem, a: torch.Tensor, epilogue: Epilogue) -> None:
    """Refuse scales without fp8 operands, and fp8 operands without scales."""
    op, first = problem.op, OPERATORS[problem.op].arguments[0]
    for name, scale in (("scale_a", epilogue.scale_a), ("scale_b", epilogue.scale_b)):
        if not problem.scaled:
            if scale is not None:
                raise refused(op, f"{name} is given", f"none for {first} of {problem.dtype}")
        elif scale is None:
            raise refused(op, f"{name} is None", f"one float32 for {first} of {problem.dtype}")
        elif scale.numel() != 1:
            raise refused(op, f"{name} has shape {_shape(scale)}", "one element")
        else:
            require_like(op, name, scale, first, a, torch.float32)


def fp8_obstacle(problem: Problem) -> str | None:
    """Return why tensor cores cannot multiply these fp8 operands, with what is expected, as for
    ``torch._scaled_mm``; else None."""
    second = OPERATORS[problem.op].arguments[1]
    if not problem.transposed:
        return (
            f"{second} is of {problem.dtype} and (K, N) in memory; expected the transpose of a "
            "row-major (N, K)"
        )
    for name, extent in (("N", problem.N), ("K", problem.K)):
        if extent % ALIGNMENT:
            return f"{name}={extent}; expected a multiple of {ALIGNMENT} for {problem.dtype}"
    return None


def require_operands(op: str, a: Any, b: Any, out: Any, epilogue: Epilogue) -> None:
    """Apply ``require_dense`` to all arguments of a GEMM."""
    bias, scale_a, scale_b, _ = epilogue
    if is_dense(a) and is_dense(b) and bias is scale_a is scale_b is out is None:
        return  # naming the arguments costs more than the check
    first, second = OPERATORS[op].arguments
    require_dense(op, **{first: a, second: b})
    require_dense_or_none(op, bias=bias, scale_a=scale_a, scale_b=scale_b, out=out)


def as_kernel_operands(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue
) -> tuple[torch.Tensor, torch.Tensor, Epilogue]:
    """Return the operands as kernels can read them.

    An operand with gaps or without alignment is copied, with one warning for each argument of an
    operator.
    """
    first, second = OPERATORS[problem.op].arguments
    a = as_kernel_operand(problem.op, first, a)
    b = problem.stored(as_kernel_operand(problem.op, second, problem.stored(b)))
    bias, scale_a, scale_b, _ = epilogue
    if bias is not None:
        bias = as_kernel_operand(problem.op, "bias", bias)
    if scale_a is not None:
        scale_a, scale_b = scale_a.reshape(1), scale_b.reshape(1)
    return a, b, Epilogue(bias, scale_a, scale_b, problem.out_dtype)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
