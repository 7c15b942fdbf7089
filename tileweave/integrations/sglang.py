"""Sequence-parallel layers of SGLang by TileWeave's operators.

    SGLANG_PLUGINS=tileweave sglang serve ... --enable-layernorm-sp

enables it, see ``engines``. These layers call operators of ``torch.ops.symm_mem``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers import layernorm_sp
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from . import torch as symm_mem
from .engines import padded

_uses_operators = False
"""Whether the model calls operators of ``torch.ops.symm_mem``."""


def enable() -> None:
    """Implement the operators of a model with sequence parallelism, and pad its batches."""
    for function, hook in (
        (layernorm_sp.initialize_layernorm_sp, _initialize),
        (layernorm_sp.sp_entry_scatter, _entry_scatter),
        (layernorm_sp.row_parallel_gbar_matmul, _row_parallel),
    ):
        target = f"{function.__module__}.{function.__name__}"
        HookRegistry.register(target, hook, HookType.AROUND)


def _initialize(initialize: Callable[..., None], *, model_config: Any) -> None:
    """Muse Spark has kernels of its own, and buffers for batches without zeros."""
    global _uses_operators
    initialize(model_config=model_config)
    (architecture, *_) = model_config.hf_config.architectures or [None]
    is_muse = layernorm_sp.is_muse_spark_architecture(architecture)
    _uses_operators = layernorm_sp.layernorm_sp_enabled() and not is_muse
    if _uses_operators:
        symm_mem.enable()


def _entry_scatter(scatter: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    """Return this rank's rows of a batch and zeros, which the layers drop after each gather."""
    if not _uses_operators:
        return scatter(hidden_states)
    shard = scatter(padded(hidden_states))
    layernorm_sp.set_sp_num_tokens(len(hidden_states))
    return shard


def _row_parallel(
    multiply: Callable[..., Tensor], linear: Any, input_: Tensor, bias: Tensor | None
) -> Tensor:
    """Return this rank's rows of the output, as many as ``_entry_scatter`` returns."""
    return multiply(linear, padded(input_) if _uses_operators else input_, bias)
