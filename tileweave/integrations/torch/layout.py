"""Axes of activations, and torch's own implementation of what TileWeave does not accept.

The gathered or scattered axis becomes the first one, and all but the last are flattened to rows.
Inductor passes activations whose memory has this order, so nothing is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from ...ops.core.checks import refused
from ...ops.core.epilogue import FP8, Epilogue


def flatten(x: Tensor, axis: int) -> Tensor:
    """Return the rows of activations, (rows, columns), ordered by ``axis`` first."""
    return x.movedim(axis, 0).flatten(0, -2)


def unflatten(rows: Tensor, like: Tensor, axis: int) -> Tensor:
    """Return rows with the axes that ``flatten`` has flattened; the extent of ``axis`` and the
    number of columns may differ from ``like``."""
    inner = like.movedim(axis, 0).shape[1:-1]
    return rows.view(-1, *inner, rows.shape[-1]).movedim(0, axis)


def require_fp8(name: str, a: Tensor, epilogue: Epilogue, result_scale: Tensor | None) -> None:
    """Refuse scaled products that TileWeave's operators do not have."""
    if a.dtype != FP8:
        raise refused(name, f"A is of {a.dtype}", f"{FP8}")
    if epilogue.out_dtype is None:
        raise refused(name, "out_dtype=None", "bfloat16 or float16")
    if result_scale is not None:
        raise refused(name, "a scale of the result is given", "none")


def enable_group(name: str) -> None:
    """Let Inductor fuse collectives of a group, and let torch's own implementations exchange its
    tensors. Not collective."""
    if not symm_mem.is_symm_mem_enabled_for_group(name):
        with warnings.catch_warnings():  # deprecated, but Inductor still asks for it
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(name)


def torch_implementation(name: str, a: Tensor, group: str) -> Callable[..., Any]:
    """Return torch's own implementation of an operator for the device of ``a``."""
    enable_group(group)
    return getattr(symm_mem, f"_{name}" if a.is_cuda else f"_{name}_fallback")
