"""Quantization of rows before they are sent to experts."""

from __future__ import annotations

from typing import Any

import torch

from ..core.checks import as_kernel_operand, refused
from ..core.epilogue import FP8
from ..core.library import define
from ..core.quantize import FP8_MAX, quantized_blocks
from .kernels.grouped_gemm import SCALED
from .kernels.quantize import THREADS, quantize_program
from .local_kernels import compiled

QUANTS = (f"fp8_1x{SCALED}",)
"""Legal values of ``quant`` besides None."""
NAME = "quantize_rows"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Types of the kernel, as TileLang writes them."""
_THREADS_PER_SM = 1024
MIN_ABSMAX = FP8_MAX * torch.finfo(torch.float32).tiny
"""Minimum of the largest absolute value of a block: with less, its scale would be subnormal."""


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
    return quantized_blocks(x, SCALED, MIN_ABSMAX)


def has_kernel(x: torch.Tensor) -> bool:
    """Return whether the kernel quantizes the rows; otherwise torch does."""
    return x.is_cuda and x.dtype in _DTYPES and x.shape[1] % SCALED == 0


def _eager(x, offsets) -> tuple[torch.Tensor, torch.Tensor]:
    if not has_kernel(x):
        return quantized(x)
    values, scales = _fake(x, offsets)
    (rows, columns), experts = x.shape, len(offsets)
    if rows:
        with torch.cuda.device(x.device):
            processors = torch.cuda.get_device_properties(x.device).multi_processor_count
            blocks = processors * _THREADS_PER_SM // THREADS
            program = quantize_program, columns, experts, _DTYPES[x.dtype], MIN_ABSMAX, blocks
            x, written = (
                t.view(rows, -1, SCALED) for t in (as_kernel_operand(NAME, "x", x), values)
            )
            compiled(NAME, *program)(
                x, as_kernel_operand(NAME, "offsets", offsets), written, scales
            )
    return values, scales


def _fake(x, offsets) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x.shape[0], -(-x.shape[1] // SCALED)
    return x.new_empty(x.shape, dtype=FP8), x.new_empty(shape, dtype=torch.float32)


_quantize_rows = define(f"{NAME}(Tensor x, Tensor offsets) -> (Tensor, Tensor)", _eager, _fake)


def quantized_rows(x: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``quantized`` returns, for the rows of experts only, in one kernel on a GPU.
    Other rows are undefined.

    Args:
        x: (rows, H), floating-point, without a gradient.
        offsets: (E,) int32, the end of the rows of each expert.
    """
    return _quantize_rows(x, offsets)
