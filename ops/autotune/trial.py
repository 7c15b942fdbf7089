"""Problems to measure: shapes, inputs, and a reference for the results."""

from __future__ import annotations

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from ..core import nccl
from ..core.epilogue import Epilogue
from ..core.problem import Problem, result_of
from ..core.registry import OPERATORS

TOLERANCE = 1e-2
"""Largest relative error, in the Frobenius norm, of a correct bf16 or fp16 result."""


def problem_of(
    op: str, M: int, N: int, K: int, ranks: int, dtype: torch.dtype, transposed: bool = True
) -> Problem:
    """Return the problem of each rank for a GEMM of the whole group.

    Args:
        M, N, K: extents of the whole group's GEMM. The ranks share N if the operator gathers, else
            K; and also M, unless it returns the whole sum.

    Raises:
        TileWeaveError: the number of ranks does not divide these extents.
    """
    gathers, scatters = OPERATORS[op].gathers, OPERATORS[op].scatters
    for name, extent, is_shared in (
        ("M", M, gathers or scatters), ("N", N, gathers), ("K", K, not gathers)
    ):  # fmt: skip
        if is_shared and extent % ranks:
            raise TileWeaveError(
                f"{op}: {name}={extent} of the whole group; expected a multiple of {ranks}, the "
                "ranks"
            )
    rows, N, K = (M // ranks, N // ranks, K) if gathers else (M, N, K // ranks)
    return Problem(op, rows, N, K, ranks, dtype, transposed, result=result_of(op, dtype))


class Trial:
    """Inputs of one problem, and memory for its result.

    Attributes:
        c: memory of this rank's result.
        epilogue: scales of fp8 operands.
    """

    def __init__(self, problem: Problem, group: Group) -> None:
        self.problem, self.group = problem, group
        self.c = self.new(*problem.shape)
        self.epilogue = Epilogue(out_dtype=problem.out_dtype)
        if problem.scaled:
            scales = torch.tensor([[0.5], [2.0 + group.rank]], device=group.device)
            self.epilogue = self.epilogue._replace(scale_a=scales[0], scale_b=scales[1])
        # torch's default generator belongs to the user; each rank has its own seed.
        self._random = torch.Generator(group.device).manual_seed(group.rank)

    def new(self, *extents: int) -> torch.Tensor:
        """Allocate uninitialized memory of the result's type."""
        return torch.empty(extents, device=self.group.device, dtype=self.problem.out_dtype)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new random inputs; b is stored in the order of the problem."""
        p = self.problem
        stored = (p.N, p.K) if p.transposed else (p.K, p.N)
        a, b = (
            self.new(*s).normal_(generator=self._random).div_(8) for s in ((p.rows, p.K), stored)
        )
        return a.to(p.dtype), p.stored(b.to(p.dtype))

    def rows_of(self, a: torch.Tensor) -> torch.Tensor:
        """Return the rows that are multiplied by b: the rows of all ranks, or ``a``. Collective."""
        return nccl.all_gather(a, self.group) if self.problem.gathers else a

    def sum_of(self, product: torch.Tensor) -> torch.Tensor:
        """Return the operator's result from each rank's product. Collective."""
        if self.problem.gathers:
            return product
        total = product.new_empty(self.problem.shape)
        OPERATORS[self.problem.op].collective.unfused(product, total, self.group)
        return total

    def expected_of(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the expected result in fp32. Collective."""
        a, b = a.float(), b.float()
        if self.epilogue.scales is not None:
            scale_a, scale_b = self.epilogue.scales
            b = b * (scale_a * scale_b)
        return self.sum_of(self.rows_of(a) @ b)

    def error_of(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
        """Return the relative error of the result ``c`` for these inputs. Collective."""
        return error_number(c, self.expected_of(a, b))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative error in the Frobenius norm."""
    return (result.float() - expected).norm() / expected.norm()


def error_number(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``relative_error`` as a number; infinite if ``result`` contains NaN."""
    error = relative_error(result, expected).item()
    return error if error == error else float("inf")
