"""Styles of ``parallelize_module`` for models that are not compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as torch_styles

from ... import ops
from ...builtins.versions import unsupported_torch
from ...ops.core.checks import refused
from .layout import flatten, unflatten


class Styles(NamedTuple):
    """Styles by the names of torch's.

    Attributes:
        ColwiseParallel: gathers its input by ``all_gather_matmul``.
        RowwiseParallel: adds its output by ``matmul_reduce_scatter`` or ``matmul_all_reduce``.
        SequenceParallel: torch's own, which does not communicate.
    """

    ColwiseParallel: type[torch_styles.ColwiseParallel]
    RowwiseParallel: type[torch_styles.RowwiseParallel]
    SequenceParallel: type[torch_styles.SequenceParallel]


class ColwiseParallel(torch_styles.ColwiseParallel):
    """Columns of the weight are sharded, and rows of the input. Layouts and modules without an
    operator of TileWeave get torch's implementation."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = _axis_of_rows(self.input_layouts)
        if axis is None or self.output_layouts != (Shard(-1),):
            return super()._apply(module, device_mesh)
        if not divides(module, 0, device_mesh):
            return super()._apply(module, device_mesh)

        def multiply(module: nn.Module, x: Tensor) -> Tensor:
            _check_axis("ColwiseParallel", x, axis)
            weight, bias = _local(module.weight), _local(module.bias)
            rows = flatten(x, axis)
            product = ops.all_gather_matmul(rows, weight.t(), device_mesh, bias=bias)
            return unflatten(product, x, axis).contiguous()

        return _replace(self, module, device_mesh, multiply)


class RowwiseParallel(torch_styles.RowwiseParallel):
    """Rows of the weight are sharded, and columns of the input; the output is added up. Layouts and
    modules without an operator of TileWeave get torch's implementation."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = _axis_of_rows(self.output_layouts)
        is_replicated = self.output_layouts == (Replicate(),)
        if not (is_replicated or axis is not None) or self.input_layouts != (Shard(-1),):
            return super()._apply(module, device_mesh)
        if not divides(module, 1, device_mesh):
            return super()._apply(module, device_mesh)

        def multiply(module: nn.Module, x: Tensor) -> Tensor:
            if axis is None:
                return row_parallel(module, x, device_mesh)
            _check_axis("RowwiseParallel", x, axis)
            weight, rows = _local(module.weight).t(), flatten(x, axis)
            bias = _local(module.bias, Partial())  # each rank has the gradient of its rows
            total = ops.matmul_reduce_scatter(rows, weight, device_mesh, bias=bias)
            return unflatten(total, x, axis).contiguous()

        return _replace(self, module, device_mesh, multiply)


def parallel_styles() -> Styles:
    """Return styles for ``torch.distributed.tensor.parallel.parallelize_module`` that call the
    operators without a compiler, and keep all else as torch's styles do.

    Gate and up, or q, k and v, gather their input once each; compiled models share one gather. For
    a release of torch that is not supported they are torch's own, and a warning says why.
    """
    if reason := unsupported_torch(torch.__version__):
        message = f"parallel_styles: torch's own styles are returned: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        names = Styles._fields
        return Styles(*(getattr(torch_styles, name) for name in names))
    return Styles(ColwiseParallel, RowwiseParallel, torch_styles.SequenceParallel)


def row_parallel(module: nn.Module, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the output of a linear layer whose weight is a DTensor with sharded columns, as are
    those of x (..., columns of this rank): all ranks get the sum."""
    weight, bias = _local(module.weight).t(), _local(module.bias)
    total = ops.matmul_all_reduce(x.reshape(-1, x.shape[-1]), weight, mesh, bias=bias)
    return total.view(*x.shape[:-1], total.shape[-1])


def _axis_of_rows(layouts: tuple[Any, ...]) -> int | None:
    """Return the sharded axis; None if no axis, or one that is counted from the last, is."""
    layout = layouts[0]
    return layout.dim if isinstance(layout, Shard) and layout.dim >= 0 else None


def divides(module: nn.Module, axis: int, mesh: DeviceMesh) -> bool:
    """Return whether a module is a linear layer, without a ``forward`` of its own, whose shards are
    equal."""
    is_linear = getattr(type(module), "forward", None) is nn.Linear.forward
    return is_linear and mesh.ndim == 1 and module.weight.shape[axis] % mesh.size() == 0


def _check_axis(style: str, x: Tensor, axis: int) -> None:
    if axis >= x.ndim - 1:
        raise refused(style, f"Shard({axis}) of {x.ndim} axes", "an axis of rows, before the last")


def _local(parameter: Any, gradient: Any = None) -> Any:
    """Return the shard of a parameter; None for None.

    Args:
        gradient: placement of its gradient; None for that of the parameter.
    """
    if parameter is None:
        return None
    return parameter.to_local(grad_placements=gradient and [gradient])


def _replace(
    style: Any,
    module: nn.Module,
    mesh: DeviceMesh,
    multiply: Callable[[nn.Module, Tensor], Tensor],
) -> nn.Module:
    """Shard a linear layer, and let it call ``multiply`` with itself and its local input."""

    def forward(self: nn.Module, x: Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(placements=style.input_layouts).to_local()
        y = multiply(self, x)
        if style.use_local_output:
            return y
        return DTensor.from_local(y, mesh, style.output_layouts, run_check=False)

    module = distribute_module(module, mesh, style._partition_linear_fn)
    module.forward = MethodType(forward, module)  # a deep copy calls it with its own weights
    return module
