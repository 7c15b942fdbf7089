"""Arguments of a grouped GEMM: which ones are legal, and what follows from them."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch

from ..core.epilogue import FP8
from ..core.problem import (
    ALIGNMENT,
    check_layout,
    refused,
    require_apart,
    require_like,
    result_of,
)
from .kernels.grouped_gemm import SCALED

NAME = "grouped_matmul"


class Scales(NamedTuple):
    """Scales of fp8 operands, each None for other types.

    Attributes:
        x: one element, or (rows, K / 128).
        w: one element or (E,), or (E, N / 128, K / 128).
    """

    x: torch.Tensor | None
    w: torch.Tensor | None

    @property
    def kind(self) -> str:
        """``GroupedConfig.scales``."""
        if self.w is None:
            return ""
        return "block" if self.w.ndim == 3 else "tensor"


def is_transposed(w: torch.Tensor) -> bool:
    """Return whether (E, N, K) weights are stored in this order; otherwise it is (E, K, N)."""
    return w.is_contiguous() or not w.transpose(1, 2).is_contiguous()


def check(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, scales: Scales,
    out_dtype: torch.dtype | None,
) -> torch.dtype:  # fmt: skip
    """Return the type of the result.

    Raises:
        TileWeaveError: shapes, types or devices are invalid.
    """
    if x.ndim != 2 or x.shape[1] == 0:
        raise refused(NAME, f"x has shape {tuple(x.shape)}", "(rows, K) with K > 0")
    if not x.is_floating_point():
        raise refused(NAME, f"x is of {x.dtype}", "a floating-point type")
    if w.ndim != 3 or 0 in w.shape:
        raise refused(NAME, f"w has shape {tuple(w.shape)}", "three positive extents (E, N, K)")
    if w.shape[2] != x.shape[1]:
        expected = f"(E, N, {x.shape[1]}) for x of shape {tuple(x.shape)}"
        raise refused(NAME, f"w has shape {tuple(w.shape)}", expected)
    require_like(NAME, "w", w, "x", x)
    if tuple(offsets.shape) != (w.shape[0],):
        expected = f"({w.shape[0]},) for w of shape {tuple(w.shape)}"
        raise refused(NAME, f"offsets has shape {tuple(offsets.shape)}", expected)
    require_like(NAME, "offsets", offsets, "x", x, torch.int32)
    result = result_of(NAME, x.dtype, out_dtype) or x.dtype
    _check_scales(x, w, scales)
    return result


def _check_scales(x: torch.Tensor, w: torch.Tensor, scales: Scales) -> None:
    """Refuse scales without fp8 operands, and fp8 operands that the kernel cannot multiply."""
    named = {"scale_x": scales.x, "scale_w": scales.w}
    for name, scale in named.items():
        if x.dtype != FP8:
            if scale is not None:
                raise refused(NAME, f"{name} is given", f"none for x of {x.dtype}")
        elif scale is None:
            raise refused(NAME, f"{name} is None", f"float32 for x of {x.dtype}")
        else:
            require_like(NAME, name, scale, "x", x, torch.float32)
    if scales.x is None or scales.w is None:
        return
    (rows, K), (experts, N) = x.shape, w.shape[:2]
    parts = ceil(K / SCALED)
    if scales.kind == "block":
        shapes = {"scale_x": [(rows, parts)], "scale_w": [(experts, ceil(N / SCALED), parts)]}
    else:
        shapes = {"scale_x": [(), (1,)], "scale_w": [(), (1,), (experts,)]}
    for name, legal in shapes.items():
        shape = tuple(getattr(scales, name[-1]).shape)
        if shape not in legal:
            raise refused(NAME, f"{name} has shape {shape}", " or ".join(map(str, legal)))
    if not is_transposed(w):
        raise refused(NAME, f"w is of {w.dtype} and (E, K, N) in memory", "(E, N, K)")
    for name, extent in (("N", N), ("K", K)):
        if extent % ALIGNMENT:
            raise refused(NAME, f"{name}={extent}", f"a multiple of {ALIGNMENT} for {w.dtype}")


def check_out(
    out: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, w: torch.Tensor,
    offsets: torch.Tensor, scales: Scales,
) -> None:  # fmt: skip
    """Refuse a tensor that cannot receive the result, which is of type ``dtype``."""
    shape = x.shape[0], w.shape[1]
    if tuple(out.shape) != shape:
        raise refused(NAME, f"out has shape {tuple(out.shape)}", f"{shape}")
    require_like(NAME, "out", out, "x", x, dtype)
    if out.device.type != "meta":
        check_layout(NAME, out)
        require_apart(NAME, out, x=x, w=w, offsets=offsets, scale_x=scales.x, scale_w=scales.w)
