"""Problems to measure: of which shapes, with which inputs, and whether a result is right."""

from __future__ import annotations

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from ..core import nccl
from ..core.epilogue import Epilogue
from ..core.problem import Problem, result_of

TOLERANCE = 1e-2
"""Largest relative error, in the Frobenius norm, of bf16 and fp16."""


def problem_of(
    op: str, M: int, N: int, K: int, ranks: int, dtype: torch.dtype, transposed: bool = True
) -> Problem:
    """What each rank does of a product of the whole group.

    Args:
        M, N, K: of the whole group. For ``all_gather_matmul`` N, else K is shared out among the
            ranks; so is M, but for ``matmul_all_reduce``.

    Raises:
        TileWeaveError: ranks cannot share them out.
    """
    gathers, scatters = op == "all_gather_matmul", op == "matmul_reduce_scatter"
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
    """Inputs for one problem, and the memory of its result.

    Attributes:
        c: memory for this rank's result.
        epilogue: what fp8 operands are scaled by.
    """

    def __init__(self, problem: Problem, group: Group) -> None:
        self.problem, self.group = problem, group
        self.c = self.new(*problem.shape)
        self.epilogue = Epilogue(out_dtype=problem.out_dtype)
        if problem.scaled:
            scales = torch.tensor([[0.5], [2.0 + group.rank]], device=group.device)
            self.epilogue = self.epilogue._replace(scale_a=scales[0], scale_b=scales[1])
        # Not torch's own, which belongs to the user; and every rank has other numbers.
        self._random = torch.Generator(group.device).manual_seed(group.rank)

    def new(self, *extents: int) -> torch.Tensor:
        """Memory of the result's type, unwritten."""
        return torch.empty(extents, device=self.group.device, dtype=self.problem.out_dtype)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Fresh random ones; b lies in memory as the problem says."""
        p = self.problem
        stored = (p.N, p.K) if p.transposed else (p.K, p.N)
        a, b = (
            self.new(*s).normal_(generator=self._random).div_(8) for s in ((p.rows, p.K), stored)
        )
        return a.to(p.dtype), p.stored(b.to(p.dtype))

    def rows_of(self, a: torch.Tensor) -> torch.Tensor:
        """What is multiplied by b: the rows of all ranks, or ``a``. Collective."""
        return nccl.all_gather(a, self.group) if self.problem.gathers else a

    def sum_of(self, product: torch.Tensor) -> torch.Tensor:
        """The result, of each rank's product, in whose place it may be. Collective."""
        if self.problem.scatters:
            total = product.new_empty(self.problem.shape)
            nccl.reduce_scatter(product, total, self.group)
            return total
        if not self.problem.gathers:
            nccl.all_reduce(product, self.group)
        return product

    def right_of(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The right result, in fp32. Collective."""
        a, b = a.float(), b.float()
        if self.epilogue.scales is not None:
            scale_a, scale_b = self.epilogue.scales
            b = b * (scale_a * scale_b)
        return self.sum_of(self.rows_of(a) @ b)

    def error_of(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
        """Relative error of the result ``c`` for these inputs. Collective."""
        return relative_error(c, self.right_of(a, b))


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    """In the Frobenius norm; infinite where ``found`` holds what is no number."""
    error = ((found.float() - right).norm() / right.norm()).item()
    return error if error == error else float("inf")
