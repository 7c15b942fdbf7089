"""Attention in ``torch.distributed.tensor.experimental.context_parallel`` by ``ops.sp_attention``.

There, torch calls ``scaled_dot_product_attention`` with DTensors whose sequence is sharded, and has
a handler for each implementation of attention, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ... import ops
from ...ops.attention.backward import sp_attention_backward
from ...ops.attention.problem import checked_attention
from ...ops.attention.sp_attention import SpAttention
from ...ops.core.checks import refused
from ...ops.core.groups import name_of, ranks_of
from .calls import accepted

_NAME = "scaled_dot_product_attention"
_IMPLEMENTATIONS = (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
)  # fmt: skip
"""Implementations of torch; it has no handler for the last one."""
_SEQUENCE = Shard(2)
"""Placement of (B, H, rows, D)."""


@contextmanager
def handlers() -> Iterator[None]:
    """Replace torch's handlers by those of this file while the context is open."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    handlers_of_torch, ours = _attention.custom_ops, {}
    for name in _IMPLEMENTATIONS:
        for direction, compute in (("", _forward), ("_backward", _backward)):
            overload = getattr(torch.ops.aten, f"_scaled_dot_product_{name}{direction}").default
            own = handlers_of_torch.get(overload, _refuse)
            ours[overload] = partial(_handle, compute, own, _attention._cp_options)
    with mock.patch.dict(handlers_of_torch, ours):
        yield


def _handle(
    compute: Callable[..., list[Tensor]], own: Callable[..., Any], settings: Any,
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Compute attention by TileWeave, or by ``own`` if TileWeave does not accept the call.

    Args:
        compute: ``_forward`` or ``_backward``.
        settings: of torch's context parallelism.
        overload, args, kwargs: the operator of ATen, with DTensors.
    """
    call = {a.name: a.default_value for a in overload._schema.arguments}
    call |= dict(zip(call, args, strict=False)) | kwargs
    mesh, causal = call["query"].device_mesh, call["is_causal"]
    options = {
        "causal": causal,
        "layout": "zigzag" if causal and settings.enable_load_balance else "contiguous",
        "softmax_scale": call["scale"],
    }
    with torch.no_grad():  # of autograd, which has called this
        tensors = {
            name: x.to_local() if isinstance(x, DTensor) else x
            for name, x in call.items()
            if isinstance(x, Tensor)
        }
        if not _accepts(overload, call, tensors, name_of(mesh), options):
            return own(overload, args, kwargs)
        results = [
            DTensor.from_local(x, mesh, [_SEQUENCE], run_check=False)
            for x in compute(tensors, group=mesh, **options)
        ]
    # Others, such as the state of random numbers, are read by torch's backward pass only.
    others = [
        torch.empty(0) if isinstance(declared.type, torch.TensorType) else 0
        for declared in overload._schema.returns[len(results) :]
    ]
    return *results, *others


def _accepts(
    overload: Any, call: Mapping[str, Any], tensors: Mapping[str, Tensor],
    group: str, options: Mapping[str, Any],
) -> bool:  # fmt: skip
    """Count a call. Return whether TileWeave computes it."""
    q, k, v = qkv = [_transposed(tensors[name]) for name in ("query", "key", "value")]
    dropout = call["dropout_p"]
    mask = call.get("attn_mask", call.get("attn_bias"))
    has_mask = mask is not None and mask.numel() > 0

    def strategy() -> ops.Strategy:
        if dropout:
            raise refused(_NAME, f"dropout_p={dropout}", "0")
        if has_mask:
            raise refused(_NAME, "a mask is given", "is_causal=True, or no mask")
        if options["causal"] and q.shape[1] != k.shape[1]:
            raise refused(_NAME, f"{k.shape[1]} keys with is_causal=True", f"{q.shape[1]}")
        ranks = ranks_of(group)
        problem = checked_attention(q, k, v, ranks.world_size, **options)
        chosen = SpAttention.strategy(problem, ranks, "auto", q.device)
        if q.is_cuda and chosen.name == "nccl":  # slower than torch's own
            raise refused(_NAME, chosen.reason, "a call that has a kernel")
        return chosen

    name = overload._schema.name.removeprefix("aten::")
    return accepted(name, qkv, (), (dropout, has_mask, group, *options.values()), strategy)


def _forward(tensors: Mapping[str, Tensor], **options: Any) -> list[Tensor]:
    q, k, v = (_transposed(tensors[name]) for name in ("query", "key", "value"))
    out, lse = ops.sp_attention(q, k, v, return_lse=True, **options)
    return [_transposed(out), lse]


def _backward(tensors: Mapping[str, Tensor], **options: Any) -> list[Tensor]:
    grad_out = next(x for name, x in tensors.items() if name.startswith("grad_out"))
    operands = grad_out, *(tensors[name] for name in ("query", "key", "value", "out"))
    lse = tensors["logsumexp"]
    gradients = sp_attention_backward(*map(_transposed, operands), lse, **options)
    return [_transposed(x) for x in gradients]


def _transposed(x: Tensor) -> Tensor:
    """Return (B, H, rows, D) as (B, rows, H, D), or the reverse."""
    return x.transpose(1, 2)


def _refuse(*_: Any) -> Any:
    """Raise the error of a call on a CPU that TileWeave does not accept."""
    raise refused(_NAME, "torch has no context parallelism on a CPU", "a call as in explain()")
