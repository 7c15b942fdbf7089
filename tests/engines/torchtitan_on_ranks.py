"""Functions that tests/engines/torchtitan.py runs on each rank."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from tests.integrations.torch_on_ranks import error_of

EXPERTS, DIM = 4, 16


def layer() -> float:
    """Return the error of a layer and its gradients, against one process that has all experts."""
    inner = GroupedExperts.Config(dim=DIM, hidden_dim=32, num_experts=EXPERTS)
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=2)
    config = RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
    single = RoutedExperts(config)
    torch.manual_seed(0)
    for parameter in single.parameters():
        torch.nn.init.normal_(parameter)
    (line,) = apply_overrides(
        OverrideConfig(imports=["tileweave.integrations.torchtitan.moe"]), config
    )
    assert "token_dispatcher" in line
    sharded, rank, size = RoutedExperts(config), dist.get_rank(), dist.get_world_size()
    for name, parameter in single.inner_experts.named_parameters():
        own = parameter.detach().chunk(size)[rank].clone()
        setattr(sharded.inner_experts, name, torch.nn.Parameter(own))
    sharded.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,)))

    generator = torch.Generator().manual_seed(rank)
    x, scores = (
        torch.randn(2, 3, DIM, generator=generator),
        torch.rand(2, 3, 2, generator=generator),
    )
    ids = torch.rand(2, 3, EXPERTS, generator=generator).argsort(-1)[..., :2].contiguous()
    counts, results = ids.flatten().bincount(minlength=EXPERTS), []
    for model in (sharded, single):
        given = [copy.deepcopy(tensor).requires_grad_() for tensor in (x, scores)]
        y = model(*given, ids, counts)
        y.square().sum().backward()
        results.append([y, *(tensor.grad for tensor in given)])
    pairs = list(zip(*results, strict=True))
    for own, whole in zip(sharded.parameters(), single.parameters(), strict=True):
        dist.all_reduce(whole.grad)
        pairs.append((own.grad, whole.grad.chunk(size)[rank]))
    return error_of(pairs)
