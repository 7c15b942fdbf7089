"""Arguments of a grouped GEMM: which ones are legal, and what follows from them."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch

from ..core.checks import (
    ALIGNMENT,
    check_layout,
    is_dense,
    refused,
    require_dense,
    require_dense_or_none,
    require_like,
    require_no_overlap,
)
from ..core.epilogue import FP8
from ..core.problem import result_of
from .kernels.grouped_gemm import SCALED, SWIGLU

NAME = "grouped_matmul"


class Options(NamedTuple):
    """Arguments of a call besides the operands, in the order of ``torch.ops.tileweave``.

    Attributes:
        scale_x: of fp8 operands, one element, or (rows, K / 128); None for other types.
        scale_w: of fp8 operands, one element or (E,), or (E, N / 128, K / 128); None for other
            types.
        bias: (E, N), in the type of the result; added to the products.
        row_weights: (rows,) float32, factors of the rows of the result.
        epilogue: ``SWIGLU`` or None.
        out_dtype: type of the result; None for the default.
        reference: whether plain torch computes.
        clear_rest: whether rows after those of all experts become zero.
    """

    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    epilogue: str | None = None
    out_dtype: torch.dtype | None = None
    reference: bool = False
    clear_rest: bool = True

    @property
    def scales(self) -> str:
        """``GroupedConfig.scales``."""
        if self.scale_w is None:
            return ""
        return "block" if self.scale_w.ndim == 3 else "tensor"

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Tensors by the names of their arguments."""
        return dict(zip(self._fields[:4], self[:4], strict=True))

    @property
    def is_plain(self) -> bool:
        """True if the result is the products."""
        return self.bias is self.row_weights is self.epilogue is None

    def columns(self, w: torch.Tensor) -> int:
        """Return the columns of the result for (E, N, K) weights."""
        return w.shape[1] // 2 if self.epilogue == SWIGLU else w.shape[1]


def is_transposed(w: torch.Tensor) -> bool:
    """Return whether (E, N, K) weights are stored in this order; otherwise it is (E, K, N)."""
    return w.is_contiguous() or not w.transpose(1, 2).is_contiguous()


def require_tensors(x: Any, w: Any, offsets: Any, options: Options, out: Any) -> None:
    """Refuse arguments that are no dense tensors."""
    scale_x, scale_w, bias, row_weights, *_ = options
    if (
        is_dense(x)
        and is_dense(w)
        and is_dense(offsets)
        and scale_x is scale_w is bias is row_weights is out is None
    ):
        return  # naming the arguments costs more than the check
    require_dense(NAME, x=x, w=w, offsets=offsets)
    require_dense_or_none(NAME, **options.tensors, out=out)


def check(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, options: Options) -> torch.dtype:
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
    result = result_of(NAME, x.dtype, options.out_dtype) or x.dtype
    _check_scales(x, w, options)
    _check_epilogue(x, w, options, result)
    return result


def _check_epilogue(
    x: torch.Tensor, w: torch.Tensor, options: Options, result: torch.dtype
) -> None:
    """Refuse epilogues that are unknown, or do not fit operands and a result of type ``result``."""
    _, _, bias, row_weights, epilogue, *_ = options
    if epilogue not in (None, SWIGLU):
        raise refused(NAME, f"epilogue={epilogue!r}", f"None or {SWIGLU!r}")
    experts, N, K = w.shape
    if epilogue is not None and N % 2:
        raise refused(
            NAME, f"w has shape {tuple(w.shape)}", f"(E, 2 * I, {K}) for epilogue={epilogue!r}"
        )
    if epilogue is not None and options.scales == "block" and N % (2 * SCALED):
        legal = f"a multiple of {2 * SCALED} for epilogue={epilogue!r} and scales of blocks"
        raise refused(NAME, f"N={N}", legal)
    for name, tensor, shape, dtype in (
        ("bias", bias, (experts, N), result),
        ("row_weights", row_weights, (len(x),), torch.float32),
    ):
        if tensor is not None:
            if tuple(tensor.shape) != shape:
                legal = f"{shape} for x of shape {tuple(x.shape)} and w of shape {tuple(w.shape)}"
                raise refused(NAME, f"{name} has shape {tuple(tensor.shape)}", legal)
            require_like(NAME, name, tensor, "x", x, dtype)


def _check_scales(x: torch.Tensor, w: torch.Tensor, options: Options) -> None:
    """Refuse scales without fp8 operands, and fp8 operands that the kernel cannot multiply."""
    scales = {"scale_x": options.scale_x, "scale_w": options.scale_w}
    for name, scale in scales.items():
        if x.dtype != FP8:
            if scale is not None:
                raise refused(NAME, f"{name} is given", f"none for x of {x.dtype}")
        elif scale is None:
            raise refused(NAME, f"{name} is None", f"float32 for x of {x.dtype}")
        else:
            require_like(NAME, name, scale, "x", x, torch.float32)
    if x.dtype != FP8:
        return
    (rows, K), (experts, N) = x.shape, w.shape[:2]
    parts = ceil(K / SCALED)
    if options.scales == "block":
        shapes = {"scale_x": [(rows, parts)], "scale_w": [(experts, ceil(N / SCALED), parts)]}
    else:
        shapes = {"scale_x": [(), (1,)], "scale_w": [(), (1,), (experts,)]}
    for name, legal in shapes.items():
        shape = tuple(getattr(options, name).shape)
        if shape not in legal:
            raise refused(NAME, f"{name} has shape {shape}", " or ".join(map(str, legal)))
    if not is_transposed(w):
        raise refused(NAME, f"w is of {w.dtype} and (E, K, N) in memory", "(E, N, K)")
    for name, extent in (("N", N), ("K", K)):
        if extent % ALIGNMENT:
            raise refused(NAME, f"{name}={extent}", f"a multiple of {ALIGNMENT} for {w.dtype}")


def check_out(
    out: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, w: torch.Tensor,
    offsets: torch.Tensor, options: Options,
) -> None:  # fmt: skip
    """Refuse a tensor that cannot receive the result, which is of type ``dtype``."""
    shape = x.shape[0], options.columns(w)
    if tuple(out.shape) != shape:
        raise refused(NAME, f"out has shape {tuple(out.shape)}", f"{shape}")
    require_like(NAME, "out", out, "x", x, dtype)
    if out.device.type != "meta":
        check_layout(NAME, out)
        require_no_overlap(NAME, out, x=x, w=w, offsets=offsets, **options.tensors)
