"""Quantization to fp8 with one scale for each block of a row, in plain torch."""

from __future__ import annotations

from math import ceil

import torch

from .epilogue import FP8

FP8_MAX = torch.finfo(FP8).max
"""Largest number of e4m3."""


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Return x in e4m3; values beyond the largest number become that number."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantized_blocks(
    x: torch.Tensor, columns: int, least: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and scales, whose products approximate x.

    Args:
        x: (..., H), floating-point.
        columns: columns of a block.
        least: least maximum of a block; avoids scales of zero.

    Returns:
        values: (..., H), e4m3, contiguous. The largest of each block is the largest of e4m3.
        scales: (..., ceil(H / columns)) float32.
    """
    hidden = x.shape[-1]
    padding = -hidden % columns
    wide = torch.nn.functional.pad(x, (0, padding)) if padding else x
    blocks = wide.float().unflatten(-1, (ceil(hidden / columns), columns))
    scales = blocks.abs().amax(-1).clamp(min=least) / FP8_MAX
    values = (blocks / scales.unsqueeze(-1)).flatten(-2)[..., :hidden]
    return to_fp8(values).contiguous(), scales
