"""Experts and layers of transformers that call the operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.activations import ACT2FN
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import RowwiseParallel
from transformers.integrations.moe import use_experts_implementation

from ... import ops
from ...runtime.kernel.kernel import capturing
from ..torch.styles import divides, row_parallel

_NAME, _ROWWISE = "tileweave", "rowwise"


def register() -> None:
    """Let models that are loaded from now on use what is defined here."""
    EPImplementationInterface.register(_NAME, Experts)
    ALL_PARALLEL_STYLES.register(_ROWWISE, Rowwise())


def unregister() -> None:
    """Undo ``register``."""
    EPImplementationInterface._global_mapping.pop(_NAME, None)
    ALL_PARALLEL_STYLES.register(_ROWWISE, RowwiseParallel())


class Experts(EPImplementation):
    """Experts that get their tokens by TileWeave's operators, in CUDA graphs, too, and with
    gradients.

    Ranks that share a batch send a slice of it each. Experts that are gated by SiLU, without biases
    and quantization, are one call of ``expert_mlp``. Others run their own ``forward`` between
    ``dispatch`` and ``combine``, on rows of a constant number: those without a token belong to no
    expert.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        self._most = 0
        """Largest number of tokens of a rank in the latest call outside of a capture."""

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:  # fmt: skip
        tokens = hidden_states, top_k_index, top_k_weights
        if self.tp_mesh.size() == 1:
            most = self._most_tokens(len(hidden_states))
            result = self._computed(*tokens, most)
            return result if len(result) == most else result.clone()  # FSDP warns of views
        own = (
            DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False)
            .redistribute(placements=[Shard(0)])
            .to_local()
            for x in tokens
        )
        most = -(-len(hidden_states) // self.tp_mesh.size())
        if not self.shares_batch:
            most = self._most_tokens(most)
        result = self._computed(*own, most).contiguous()
        shape = hidden_states.shape
        return DTensor.from_local(
            result, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
        ).full_tensor()

    def _most_tokens(self, count: int) -> int:
        """Return the largest number of tokens of a rank, for which the host waits."""
        if not capturing():
            most = torch.tensor(count, device=self.ep_mesh.device_type)
            dist.all_reduce(most, dist.ReduceOp.MAX, self.ep_mesh.get_group())
            self._most = int(most)
        return self._most

    def _computed(self, x: Tensor, ids: Tensor, weights: Tensor, most: int) -> Tensor:
        options: Any = {"group": self.ep_mesh.get_group(), "max_tokens": most}
        experts = self._experts
        if _is_silu_mlp(experts):
            return ops.expert_mlp(
                x, ids, weights, experts.gate_up_proj, experts.down_proj, **options
            )
        count = self.num_local_experts * self.ep_mesh.size()
        rows, offsets, handle = ops.dispatch(x, ids, weights, num_experts=count, **options)
        places = torch.arange(len(rows), dtype=offsets.dtype, device=offsets.device)
        local_ids = torch.searchsorted(offsets, places, right=True)[:, None]
        y = self.experts_forward(rows, local_ids, torch.ones_like(local_ids, dtype=rows.dtype))
        return ops.combine(y, handle)


class Rowwise(RowwiseParallel):
    """Rows of the weight and columns of the input are sharded; the output is added up by
    ``matmul_all_reduce``. Other layers than plain linear ones get the style of transformers."""

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if not divides(module, 1, mesh) or getattr(module, "_hf_quantized_needs_local_tp", False):
            return super().install_forward(module, mesh)

        def forward(x: Tensor) -> Tensor:
            if isinstance(x, DTensor):
                x = x.redistribute(placements=[Shard(-1)]).to_local()
            return row_parallel(module, x, mesh)

        module.forward = forward
        return module


def _is_silu_mlp(experts: nn.Module) -> bool:
    """Return whether ``expert_mlp`` computes what experts do."""
    has_gate = getattr(experts, "has_gate", False) and experts.is_concatenated
    others = ("has_bias", "is_transposed", "has_post_expert_norm")
    if not has_gate or any(getattr(experts, name) for name in others):
        return False
    gate = type(experts)._apply_gate.__module__
    is_plain = gate == use_experts_implementation.__module__  # the class has no gate of its own
    is_silu = isinstance(experts.act_fn, nn.SiLU | type(ACT2FN["silu"]))
    return is_plain and is_silu and experts.down_proj.is_floating_point()
