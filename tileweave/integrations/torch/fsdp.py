"""Communication of FSDP2 by TileWeave's collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import ops
from ...builtins.errors import TileWeaveError, brief_errors
from ...ops.core.checks import refused

_NAME = "set_fsdp_communication"
_HOOKS = "custom_all_gather", "custom_reduce_scatter", "force_sum_reduction_for_comms"
"""Settings of ``FSDPModule``, each with a method ``set_...``."""


@brief_errors
def set_fsdp_communication(model: nn.Module) -> None:
    """Let FSDP2 gather parameters by ``all_gather``, and add gradients by ``reduce_scatter``.

    Copy engines move the data where the collectives have this transport, so that products keep
    their SMs; otherwise ``auto`` decides. Sums are divided after they have been added. Call it on
    every rank after the last ``fully_shard``.

    Args:
        model: contains the modules that ``fully_shard`` has changed.

    Raises:
        TileWeaveError: it contains none, or this release of torch has other hooks.
    """
    from torch.distributed.fsdp import FSDPModule  # other users need not wait for it

    missing = [f"FSDPModule.set_{h}" for h in _HOOKS if not hasattr(FSDPModule, f"set_{h}")]
    if missing:
        raise TileWeaveError(f"{_NAME}: torch {torch.__version__} lacks {', '.join(missing)}")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise refused(_NAME, "no module is fully sharded", "a model after fully_shard")
    for module in modules:
        module.set_custom_all_gather(_AllGather())
        module.set_custom_reduce_scatter(_ReduceScatter())
        module.set_force_sum_reduction_for_comms(True)


class _Collective:
    """Collective in FSDP's form. FSDP orders what follows by events, so no work is returned."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:  # fmt: skip
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        _move(ops.all_gather, input_tensor, output_tensor, group)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> None:  # fmt: skip
        if op != dist.ReduceOp.SUM:
            raise refused(_NAME, f"FSDP reduces by {op}", "set_force_sum_reduction_for_comms(True)")
        _move(ops.reduce_scatter, input_tensor, output_tensor, group)


def _move(
    collective: Callable[..., Tensor], x: Tensor, out: Tensor, group: dist.ProcessGroup
) -> None:
    """Write the result of a collective to ``out``, by copy engines if possible."""
    transport = "copy_engine"
    try:
        ops.transport_of(collective, x, group=group, transport=transport)
    except TileWeaveError:
        transport = "auto"
    collective(x, group, out=out, transport=transport)
