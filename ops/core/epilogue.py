"""Sums of products in fp32, and what is done to them before they are rounded and stored.

As arguments of an operator, as steps of a tile program, and by torch.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch

FP8 = torch.float8_e4m3fn
ROWS = T.GemmWarpPolicy.FullRow
"""How the warp groups of a block share a product, see ``accumulate``."""
SCHEMA = "Tensor? bias, Tensor? scale_a, Tensor? scale_b, ScalarType? out_dtype"
"""The arguments as ``torch.ops.tileweave.*`` declare them, behind all others. None has a
default: torch does not show arguments with defaults to gradients."""


class Epilogue(NamedTuple):
    """What a call asks for, in the order of the kernels' parameters; None is left out of them.

    Attributes:
        bias: (N,), in the type of the result; is added to every row.
        scale_a, scale_b: one float32 each, by which fp8 operands are multiplied.
        out_dtype: of the result.
    """

    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a kernel gets."""
        return tuple([t for t in self[:3] if t is not None])

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of both operands, if they are fp8."""
        if self.scale_a is None or self.scale_b is None:
            return None
        return self.scale_a, self.scale_b

    @property
    def without_bias(self) -> "Epilogue":
        """What becomes of the products of one rank that are still to be summed over ranks."""
        return self._replace(bias=None)

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``a @ b`` and what is asked for, by torch; in ``out`` if given."""
        if self.scales is not None:
            return torch._scaled_mm(
                a, b, *self.scales, self.bias, out_dtype=self.out_dtype, out=out
            )
        if self.bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(self.bias, a, b, out=out)

    def add_to(self, c: torch.Tensor) -> None:
        """The bias, to what was summed over ranks, by torch."""
        if self.bias is not None:
            c += self.bias


NOTHING = Epilogue()


def is_fp8(dtype: str) -> bool:
    """Whether operands of a type, in TileLang's words, are multiplied by scales."""
    return dtype == "float8_e4m3fn"


def scale_of(dtype: str) -> Any:
    """The parameter for the scale of an operand; None, which is none, where it has no scale."""
    return T.Tensor((1,), "float32") if is_fp8(dtype) else None


@T.macro
def accumulate(A_tile, B_tile, total, transposed):
    """``total += A_tile @ B_tile`` in fp32; ``transposed`` is whether B is (N, K).

    Each warp group multiplies rows of its own: their instructions, twice as wide, read less shared
    memory than those of TileLang's choice, which is a square for each.

    Tensor cores of sm_90 keep sums of fp8 products in fewer bits than fp32. So each tile's are
    added by the other cores, as CUTLASS does without fast accumulation.
    """
    if is_fp8(str(A_tile.dtype)):
        part = T.alloc_fragment(total.shape, "float32")
        T.gemm(A_tile, B_tile, part, transpose_B=transposed, policy=ROWS, clear_accum=True)
        for i, j in T.Parallel(*total.shape):
            total[i, j] += part[i, j]
    else:
        T.gemm(A_tile, B_tile, total, transpose_B=transposed, policy=ROWS)


@T.macro
def multiply(A, m, B, n, A_tile, B_tile, total, transposed, stages):
    """``total`` is the rows of A from ``m`` on times the columns of B from ``n`` on, in fp32, by so
    many tiles of both in flight; ``transposed`` is whether B is (N, K)."""
    T.clear(total)
    for step in T.Pipelined(T.ceildiv(A.shape[1], A_tile.shape[1]), num_stages=stages):
        k = step * A_tile.shape[1]
        T.copy(A[m, k], A_tile)
        T.copy(B[n, k] if transposed else B[k, n], B_tile)
        accumulate(A_tile, B_tile, total, transposed)


@T.macro
def add_tile(total, tile):
    """``total += tile``, which is of another type."""
    for i, j in T.Parallel(*total.shape):
        total[i, j] += tile[i, j]


@T.macro
def scale(total, scale_a, scale_b):
    """``total *= scale_a[0] * scale_b[0]``."""
    factor = scale_a[0] * scale_b[0]
    for i, j in T.Parallel(*total.shape):
        total[i, j] *= factor


@T.macro
def add_bias(total, bias, n):
    """``total[i, j] += bias[n + j]``; columns behind the end of ``bias`` stay as they are."""
    row = T.alloc_fragment((total.shape[1],), bias.dtype)
    T.copy(bias[n], row)
    for i, j in T.Parallel(*total.shape):
        total[i, j] += row[j]
