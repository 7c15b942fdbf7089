"""``fused_matmul_reduce_scatter`` and ``fused_scaled_matmul_reduce_scatter`` by
``ops.matmul_reduce_scatter``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import ops
from ...ops.core.checks import refused
from ...ops.core.epilogue import Epilogue
from .calls import accepted
from .layout import flatten, require_fp8, torch_implementation, unflatten


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    name = "fused_matmul_reduce_scatter"

    def operands() -> tuple[Tensor, Tensor]:
        # Columns of the product are rows of the transposed product.
        return (B.t(), A.flatten(0, -2).t()) if is_last else (flatten(A, scatter_dim), B)

    def strategy() -> ops.Strategy:
        _check(name, reduce_op, scatter_dim, A.ndim)
        if is_last and not B.t().is_contiguous():  # it would be copied in each call
            raise refused(name, "columns of a row-major B are scattered", "a transposed B")
        return ops.strategy_of(ops.matmul_reduce_scatter, *operands(), group_name)

    is_last = scatter_dim == A.ndim - 1
    if not accepted(name, (A, B), (), (reduce_op, scatter_dim, group_name), strategy):
        own = torch_implementation(name, A, group_name)
        return own(A, B, reduce_op, scatter_dim, group_name)
    rows = ops.matmul_reduce_scatter(*operands(), group_name)
    total = rows.t().unflatten(0, A.shape[:-1]) if is_last else unflatten(rows, A, scatter_dim)
    return _reduced(total, reduce_op, group_name)


def fused_scaled_matmul_reduce_scatter(
    A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, reduce_op: str, orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: Sequence[int],
    bias: Tensor | None = None, result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    name, axis = "fused_scaled_matmul_reduce_scatter", orig_scatter_dim
    axes = A.flatten(0, -2).unflatten(0, tuple(output_shape[:-1]))
    epilogue = Epilogue(None, A_scale, B_scale, out_dtype)

    def strategy() -> ops.Strategy:
        _check(name, reduce_op, axis, axes.ndim - 1)
        require_fp8(name, A, epilogue, result_scale)
        if bias is not None:  # torch adds those of all ranks, TileWeave that of the owner
            raise refused(name, "a bias is given", "none")
        return ops.strategy_of(
            ops.matmul_reduce_scatter, flatten(axes, axis), B, group_name, **epilogue._asdict()
        )

    options = reduce_op, axis, group_name, tuple(output_shape), out_dtype
    others = A_scale, B_scale, bias, result_scale
    if not accepted(name, (A, B), others, options, strategy):
        return torch_implementation(name, A, group_name)(
            A, B, A_scale, B_scale, reduce_op, axis, scatter_dim_after_maybe_reshape, group_name,
            output_shape, bias, result_scale, out_dtype, use_fast_accum,
        )  # fmt: skip
    rows = ops.matmul_reduce_scatter(flatten(axes, axis), B, group_name, **epilogue._asdict())
    return _reduced(unflatten(rows, axes, axis), reduce_op, group_name)


def _check(name: str, reduce_op: str, axis: int, count: int) -> None:
    if reduce_op not in ("sum", "avg"):
        raise refused(name, f"reduce_op={reduce_op!r}", "'sum' or 'avg'")
    if not 0 <= axis < count:
        raise refused(name, f"scatter_dim={axis}", f"0 to {count - 1}")


def _reduced(total: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Return the result of a sum as torch's graphs expect it: contiguous."""
    if reduce_op == "avg":
        total.div_(dist.distributed_c10d._resolve_process_group(group_name).size())
    return total.contiguous()


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (fused_matmul_reduce_scatter, fused_scaled_matmul_reduce_scatter)
}
