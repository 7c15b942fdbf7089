"""Gradients of the epilogues of a grouped GEMM, in plain torch."""

from __future__ import annotations

import torch

from .kernels.grouped_gemm import SWIGLU
from .reference import finished


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
