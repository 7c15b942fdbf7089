"""Quantization of rows before they are sent to experts."""

from __future__ import annotations

from typing import Any

import torch

from ..core.problem import refused
from ..core.quantize import FP8_MAX, quantized_blocks
from .kernels.grouped_gemm import SCALED

QUANTS = (f"fp8_1x{SCALED}",)
"""Legal values of ``quant`` besides None."""
_LEAST = FP8_MAX * torch.finfo(torch.float32).tiny
"""Least maximum of a block: the scale of smaller values would be subnormal."""


def check_quant(op: str, quant: Any, x: torch.Tensor) -> None:
    """Refuse an unknown ``quant``, tokens that it cannot quantize, and their gradients."""
    if quant is None:
        return
    if quant not in QUANTS:
        legal = ", ".join(map(repr, (None, *QUANTS)))
        raise refused(op, f"quant={quant!r}", legal)
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        legal = f"a floating-point type of 16 bits or more for quant={quant!r}"
        raise refused(op, f"x is of {x.dtype}", legal)
    if torch.is_grad_enabled() and x.requires_grad:
        legal = "one of both, or torch.no_grad()"
        raise refused(op, f"quant={quant!r} and x requires a gradient", legal)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and scales, whose products approximate x.

    Args:
        x: (rows, H), floating-point.

    Returns:
        values: (rows, H), e4m3. The largest of each scale is the largest that e4m3 has.
        scales: (rows, H / 128), rounded up, float32: one for each 128 columns.
    """
    return quantized_blocks(x, SCALED, _LEAST)
