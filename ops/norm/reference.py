"""All-reduce with residual and RMSNorm in plain torch: for tests, CPUs, and sizes without
programs."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch

from ..core.epilogue import FP8
from .kernels.all_reduce_rms_norm import FP8_MAX, GROUP, GROUPED, LEAST_AMAX
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
        hidden = y.shape[-1]
        padded = torch.nn.functional.pad(y.float(), (0, -hidden % GROUP))
        groups = padded.unflatten(-1, (ceil(hidden / GROUP), GROUP))
        scales = groups.abs().amax(-1).clamp(min=LEAST_AMAX) / FP8_MAX
        scaled = (groups / scales.unsqueeze(-1)).flatten(-2)[..., :hidden]
        return Results(_to_fp8(scaled).contiguous(), residual, scales)
    assert inputs.scale is not None
    return Results(_to_fp8(y.float() / inputs.scale), residual)


def _to_fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)
