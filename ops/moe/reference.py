"""Grouped GEMMs in plain torch: a loop over experts, for tests, CPUs and types without kernels;
and the gradients of their epilogues."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..core.checks import refused
from .kernels.grouped_gemm import SCALED, SWIGLU
from .problem import Options


def slices_of(op: str, offsets: torch.Tensor, rows: int) -> list[slice]:
    """Return the rows of each expert. The host waits for ``offsets``.

    Raises:
        TileWeaveError: offsets decrease, or are not in [0, rows].
    """
    ends = [0, *offsets.tolist()]
    if ends != sorted(ends) or ends[-1] > rows:
        raise refused(op, f"offsets={ends[1:]}", f"ascending ends of rows, from 0 to {rows}")
    return [slice(*pair) for pair in pairwise(ends)]


def grouped_matmul(
    op: str, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, options: Options,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the rows of x, (rows, K), times the weights of their experts, (E, N, K), to ``out``,
    after the epilogue.

    Rows after those of all experts become zero.
    """
    slices = slices_of(op, offsets, len(x))
    scale_x, scale_w, bias, row_weights, epilogue, *_ = options
    wide = torch.promote_types(out.dtype, torch.float32)
    for e, rows in enumerate(slices):
        if options.is_plain and scale_w is None:
            torch.mm(x[rows], w[e].t(), out=out[rows])
            continue
        if scale_x is None or scale_w is None:
            a, b = x[rows].to(wide), w[e].to(wide)
        else:
            a, b = scaled(x, scale_x)[rows], scaled(w, scale_w, e)
        products = torch.mm(a, b.t())
        if bias is not None:
            products += bias[e]
        out[rows] = finished(products, epilogue, None if row_weights is None else row_weights[rows])
    out[slices[-1].stop :] = 0


def finished(
    products: torch.Tensor, epilogue: str | None, row_weights: torch.Tensor | None
) -> torch.Tensor:
    """Return products, (rows, N), after an epilogue, times the weights of their rows."""
    if epilogue == SWIGLU:
        gate, up = products.chunk(2, -1)
        products = torch.nn.functional.silu(gate) * up
    return products if row_weights is None else products * row_weights.unsqueeze(-1)


def through_epilogue(
    grad: torch.Tensor, products: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None,
    row_weights: torch.Tensor | None, epilogue: str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the gradients of the products and of ``row_weights``. The host does not wait.

    Args:
        grad: gradient of the result.
        products: (rows, N), without the bias; zero for rows that no expert has.
        offsets, bias, row_weights, epilogue: arguments of the call.
    """
    rows = torch.arange(len(products), device=offsets.device, dtype=offsets.dtype)
    is_used = (rows < offsets[-1]).unsqueeze(-1)
    if bias is not None:
        experts = torch.searchsorted(offsets, rows, right=True).clamp(max=len(bias) - 1)
        products = products + torch.where(is_used, bias[experts], 0)
    grad_row_weights = None
    if row_weights is not None:
        result = finished(products, epilogue, None)
        grad_row_weights = torch.where(is_used, grad * result, 0).sum(-1).to(row_weights.dtype)
        grad = grad * row_weights.unsqueeze(-1)
    if epilogue == SWIGLU:
        gate, up = products.chunk(2, -1)
        sigmoid = gate.sigmoid()
        of_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        grad = torch.cat([of_gate, grad * gate * sigmoid], -1)
    return grad, grad_row_weights


def scaled(x: torch.Tensor, scale: torch.Tensor, expert: int | None = None) -> torch.Tensor:
    """Return fp8 numbers times their scales, in fp32: all of x, or the weights of an expert."""
    if expert is not None:
        scale = scale.expand(len(x)) if scale.numel() == 1 else scale
        x, scale = x[expert], scale[expert]
    if scale.numel() == 1 and scale.ndim < 2:
        return x.float() * scale
    columns = scale.repeat_interleave(SCALED, -1)[..., : x.shape[-1]]
    if expert is not None:
        columns = columns.repeat_interleave(SCALED, 0)[: len(x)]
    return x.float() * columns


def grouped_wgrad(
    op: str, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the gradient of the weights, (E, N, K), to ``out``."""
    for weight, rows in zip(out, slices_of(op, offsets, len(x)), strict=True):
        torch.mm(grad[rows].t(), x[rows], out=weight)
