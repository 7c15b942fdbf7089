"""Row-parallel linear layers of vLLM by TileWeave's operators.

    VLLM_PLUGINS=tileweave vllm serve ...

enables it, see ``engines``.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from vllm import envs
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.utils import default_unquantized_gemm

from .. import ops
from ..ops.core.library import define
from .engines import padded

_is_fused: dict[Hashable, bool] = {}
"""Whether TileWeave's kernel computes calls, by group, shapes and type."""


class RowParallelLinear(linear.RowParallelLinear):
    """Adds its output over the ranks by ``matmul_all_reduce``, if it has a dense weight."""

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Parameter | None]:
        if not (self.reduce_results and self.tp_size > 1 and self.input_is_parallel):
            return super().forward(input_)
        method = self.quant_method
        is_dense = type(method) is linear.UnquantizedLinearMethod
        if not is_dense or method._gemm_impl is not default_unquantized_gemm:
            return super().forward(input_)
        bias, own_bias = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        y = torch.ops.tileweave.vllm_row_parallel(input_, self.weight, bias)
        return (y, own_bias) if self.return_bias else y


def enable() -> None:
    """Let models that are loaded from now on use the layer, unless another plug-in has replaced
    vLLM's or results must not depend on the batch."""
    name = linear.RowParallelLinear.__name__
    if name not in op_registry_oot and not envs.VLLM_BATCH_INVARIANT:
        linear.RowParallelLinear.register_oot(RowParallelLinear)


def _row_parallel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a layer: (..., N).

    vLLM computes calls for which TileWeave would use NCCL, because it has other all-reduces. The
    decision depends on the number of rows, which graphs do not know.

    Args:
        x: (..., columns of this rank).
        weight: (N, columns of this rank).
        bias: (N,), the same on every rank.
    """
    group, rows = get_tp_group(), x.reshape(-1, x.shape[-1])
    name, b = group.device_group.group_name, weight.t()
    key = name, rows.shape, b.shape, x.dtype
    if key not in _is_fused:
        _is_fused[key] = (
            len(rows) > 0 and ops.strategy_of(ops.matmul_all_reduce, rows, b, name).name == "fused"
        )
    if _is_fused[key]:
        y = ops.matmul_all_reduce(padded(rows), b, name, bias=bias)[: len(rows)]
    else:
        bias = None if group.rank_in_group else bias
        y = tensor_model_parallel_all_reduce(functional.linear(rows, weight, bias))
    return y.view(*x.shape[:-1], len(weight))


def _empty(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


define("vllm_row_parallel(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _row_parallel, _empty)
