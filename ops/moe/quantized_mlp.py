"""MLPs of experts with fp8 weights: arguments, and the products between dispatch and combine."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch

from ..core.checks import ALIGNMENT, refused, require_dense, require_like
from ..core.epilogue import FP8
from .grouped_matmul import grouped_matmul
from .kernels.grouped_gemm import SCALED, SWIGLU
from .quant import check_quant, quantized_rows

_RESULTS = (torch.bfloat16, torch.float16)
"""Types of tokens: those of the results of fp8 products."""


class Weights(NamedTuple):
    """Weights of a rank's experts, with a scale for each 128 x 128 of them if they are fp8.

    Attributes:
        gate_up: (E / W, 2 I, H).
        down: (E / W, H, I).
        scale_gate_up: (E / W, 2 I / 128, H / 128), rounded up; None without.
        scale_down: (E / W, H / 128, I / 128), rounded up; None without.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    scale_gate_up: torch.Tensor | None = None
    scale_down: torch.Tensor | None = None

    def named(self) -> dict[str, Any]:
        """Return the tensors by the names of the arguments of ``expert_mlp``."""
        names = "w_gate_up", "w_down", "scale_w_gate_up", "scale_w_down"
        return dict(zip(names, self, strict=True))


def check_quantized(
    op: str, quant: Any, x: torch.Tensor, topk_weights: torch.Tensor, weights: Weights
) -> None:
    """Refuse types, scales and gradients that do not fit ``quant``; shapes of weights fit x.

    Raises:
        TileWeaveError: they do not fit.
    """
    check_quant(op, quant, x)
    named = weights.named()
    for name in ("w_gate_up", "w_down"):
        scale = named[f"scale_{name}"]
        if quant is None:
            require_like(op, name, named[name], "x", x)
            if scale is not None:
                raise refused(op, f"scale_{name} is given", "none for quant=None")
            continue
        require_like(op, name, named[name], "x", x, FP8)
        if scale is None:
            raise refused(op, f"scale_{name} is None", f"float32 for quant={quant!r}")
        require_dense(op, **{f"scale_{name}": scale})
        experts, N, K = named[name].shape
        shape = experts, ceil(N / SCALED), ceil(K / SCALED)
        if tuple(scale.shape) != shape:
            raise refused(
                op, f"scale_{name} has shape {tuple(scale.shape)}",
                f"{shape} for {name} of shape {(experts, N, K)}",
            )  # fmt: skip
        require_like(op, f"scale_{name}", scale, "x", x, torch.float32)
        if not named[name].is_contiguous():
            raise refused(op, f"{name} has strides {named[name].stride()}", "a contiguous tensor")
    if quant is None:
        return
    if x.dtype not in _RESULTS:
        legal = f"{' or '.join(map(str, _RESULTS))} for quant={quant!r}"
        raise refused(op, f"x is of {x.dtype}", legal)
    for what, extent, unit in (
        ("intermediate", weights.down.shape[2], SCALED),
        ("hidden", x.shape[1], ALIGNMENT),
    ):
        if extent % unit:
            legal = f"a multiple of {unit} for quant={quant!r}"
            raise refused(op, f"{what} size {extent}", legal)
    for name, tensor in {"topk_weights": topk_weights, **named}.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            legal = "one of both, or torch.no_grad()"
            raise refused(op, f"quant={quant!r} and {name} requires a gradient", legal)


def quantized_experts(
    rows: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, weights: Weights,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Return the results of a rank's experts for e4m3 rows and their scales; rows after the last
    one are undefined.

    SwiGLU is computed in fp32 and rounded to ``dtype``; then it is quantized as the rows are.

    Args:
        dtype: type of the result.
    """
    hidden = grouped_matmul(
        rows, weights.gate_up, offsets, scale_x=scales, scale_w=weights.scale_gate_up,
        epilogue=SWIGLU, out_dtype=dtype, clear_rest=False,
    )  # fmt: skip
    values, scales = quantized_rows(hidden, offsets)
    return grouped_matmul(
        values, weights.down, offsets, scale_x=scales, scale_w=weights.scale_down,
        out_dtype=dtype, clear_rest=False,
    )  # fmt: skip
