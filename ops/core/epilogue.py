"""GEMM accumulation in fp32, and the epilogue before the result is rounded and stored.

Three forms: arguments of an operator, steps of a tile program, and torch operations.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch

FP8 = torch.float8_e4m3fn
ROWS = T.GemmWarpPolicy.FullRow
"""Partition of a product among the warp groups of a block, see ``accumulate``."""
SCHEMA = "Tensor? bias, Tensor? scale_a, Tensor? scale_b, ScalarType? out_dtype"
"""Arguments as ``torch.ops.tileweave.*`` declare them, after all others. None has a default,
because torch does not pass arguments with defaults to gradients."""


class Epilogue(NamedTuple):
    """Epilogue of a call, in the order of the kernels' parameters. A kernel has no parameter for a
    field that is None.

    Attributes:
        bias: (N,), in the type of the result; added to every row.
        scale_a, scale_b: one float32 each; factors of fp8 operands.
        out_dtype: type of the result.
    """

    bias: torch.Tensor | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a kernel receives."""
        return tuple([t for t in self[:3] if t is not None])

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of both operands if they are fp8, else None."""
        if self.scale_a is None or self.scale_b is None:
            return None
        return self.scale_a, self.scale_b

    @property
    def without_bias(self) -> "Epilogue":
        """Epilogue for one rank's partial products, which are still to be summed over ranks."""
        return self._replace(bias=None)

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``a @ b`` with this epilogue, by torch, in ``out`` if given."""
        if self.scales is not None:
            return torch._scaled_mm(
                a, b, *self.scales, self.bias, out_dtype=self.out_dtype, out=out
            )
        if self.bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(self.bias, a, b, out=out)

    def add_to(self, c: torch.Tensor) -> None:
        """Add the bias, by torch, to a result that was summed over ranks."""
        if self.bias is not None:
            c += self.bias


NOTHING = Epilogue()


def is_fp8(dtype: str) -> bool:
    """Return whether operands of a TileLang type are fp8, which is multiplied by scales."""
    return dtype == "float8_e4m3fn"


def scale_of(dtype: str) -> Any:
    """Return the annotation of an operand's scale parameter; None, so no parameter, for other types
    than fp8."""
    return T.Tensor((1,), "float32") if is_fp8(dtype) else None


@T.macro
def accumulate(A_tile, B_tile, total, transposed):
    """Compute ``total += A_tile @ B_tile`` in fp32; ``transposed`` says whether B is (N, K).

    Each warp group multiplies rows of its own. Its instructions are twice as wide as with
    TileLang's default, a square per warp group, and read less shared memory.

    Tensor cores of sm_90 accumulate fp8 products in fewer bits than fp32. So CUDA cores add the
    products of each tile, as CUTLASS does without fast accumulation.
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
    """Compute ``total``, the rows of A from ``m`` times the columns of B from ``n``, in fp32, with
    ``stages`` tiles of both operands in flight; ``transposed`` says whether B is (N, K)."""
    T.clear(total)
    for step in T.Pipelined(T.ceildiv(A.shape[1], A_tile.shape[1]), num_stages=stages):
        k = step * A_tile.shape[1]
        T.copy(A[m, k], A_tile)
        T.copy(B[n, k] if transposed else B[k, n], B_tile)
        accumulate(A_tile, B_tile, total, transposed)


@T.macro
def add_tile(total, tile):
    """Compute ``total += tile``, where ``tile`` has another type."""
    for i, j in T.Parallel(*total.shape):
        total[i, j] += tile[i, j]


@T.macro
def scale(total, scale_a, scale_b):
    """Compute ``total *= scale_a[0] * scale_b[0]``."""
    factor = scale_a[0] * scale_b[0]
    for i, j in T.Parallel(*total.shape):
        total[i, j] *= factor


@T.macro
def add_bias(total, bias, n):
    """Compute ``total[i, j] += bias[n + j]``; columns past the end of ``bias`` do not change."""
    row = T.alloc_fragment((total.shape[1],), bias.dtype)
    T.copy(bias[n], row)
    for i, j in T.Parallel(*total.shape):
        total[i, j] += row[j]
