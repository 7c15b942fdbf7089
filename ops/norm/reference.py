"""All-reduce with residual and RMSNorm in plain torch: for tests, CPUs, and sizes without
programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..core.quantize import quantized_blocks, to_fp8
from .kernels.all_reduce_rms_norm import GROUP, GROUPED, LEAST_AMAX
from .problem import Inputs


class Results(NamedTuple):
    """Results of a call.

    Attributes:
        out: normalized rows, quantized or not.
        residual: new residual.
        scales: (..., ceil(hidden / 128)) float32, if ``quant`` is ``fp8_1x128``; else None.
    """

    out: torch.Tensor
    residual: torch.Tensor
    scales: torch.Tensor | None = None


def reference(
    rows: Sequence[torch.Tensor], inputs: Inputs, eps: float, quant: str | None
) -> Results:
    """Return what every rank receives, given the rows of all ranks, ``inputs.x`` of which is not
    used. The additions are those of the programs."""
    total = inputs.residual.float()
    for x in rows:
        total = total + x.float()
    return normalized(total.to(inputs.residual.dtype), inputs, eps, quant)


def copy_valid(value: torch.Tensor, result: torch.Tensor, num_tokens: torch.Tensor | None) -> None:
    """Copy the rows of ``value`` that are valid; the others of ``result`` keep their values."""
    if num_tokens is None:
        result.copy_(value)
        return
    rows = torch.arange(value.shape[:-1].numel(), device=value.device).view(*value.shape[:-1], 1)
    is_valid = (rows < num_tokens.view(())).expand(value.shape)
    # ``where`` does not support fp8.
    kept = torch.where(is_valid, value.view(_bits(value)), result.view(_bits(result)))
    result.copy_(kept.view(value.dtype))


def _bits(tensor: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]


def normalized(residual: torch.Tensor, inputs: Inputs, eps: float, quant: str | None) -> Results:
    """Return the results for a new residual."""
    total = residual.float()
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * inputs.weight.float()
    if inputs.bias is not None:
        y = y + inputs.bias.float()
    y = y.to(residual.dtype)
    if quant is None:
        return Results(y, residual)
    if quant == GROUPED:
        values, scales = quantized_blocks(y, GROUP, LEAST_AMAX)
        return Results(values, residual, scales)
    assert inputs.scale is not None
    return Results(to_fp8(y.float() / inputs.scale), residual)
