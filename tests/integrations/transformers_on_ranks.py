"""Functions that tests/integrations runs on each rank: models of transformers."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from tests.integrations.torch_on_ranks import error_of
from tileweave import ops
from tileweave.integrations.transformers import disable, enable
from tileweave.integrations.transformers.layers import Experts

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_experts_per_tok=2, num_local_experts=4),
}


def compare(
    name: str, folder: str, shape: tuple[int, int], parallel: dict[str, Any]
) -> dict[str, Any]:
    """Compare logits and gradients of a model with those of one process, and count calls.

    Args:
        name: of a tiny model of random weights.
        folder: where the ranks save and load it.
        shape: sequences and tokens.
        parallel: arguments of ``DistributedConfig``.
    """
    torch.manual_seed(0)
    single = AutoModelForCausalLM.from_config(CONFIGS[name]())
    if dist.get_rank() == 0:
        single.save_pretrained(folder)
    dist.barrier()
    names = "expert_mlp", "dispatch", "matmul_all_reduce"
    enable()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=DistributedConfig(**parallel)
        )
    finally:
        disable()
    ids = torch.randint(64, shape, generator=torch.Generator().manual_seed(1))
    with mock.patch.multiple(ops, **{n: mock.Mock(wraps=getattr(ops, n)) for n in names}):
        result = whole(model(ids, labels=ids).logits)
        counts = {n: getattr(ops, n).call_count for n in names}
        loss = model(ids, labels=ids).loss
        whole(loss).backward()
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        generated = model.generate(ids, **options)
    expected = single(ids, labels=ids)
    expected.loss.backward()
    pairs = [(result, expected.logits)]
    own = dict(single.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        pairs.append((whole(parameter.grad), own[parameter_name].grad))
    assert torch.equal(generated, single.generate(ids, **options))
    return {"error": error_of(pairs), **counts}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def experts(name: str, counts: list[int]) -> float:
    """Compare experts with those of one process, for different numbers of tokens of the ranks, in
    calls one after the other.

    Returns:
        The error of results and gradients.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._experts_implementation = "grouped_mm"
    single = next(
        m for m in AutoModelForCausalLM.from_config(config).modules() if hasattr(m, "gate_up_proj")
    )
    total, local = single.num_experts, copy.deepcopy(single)
    for n, parameter in single.named_parameters():
        own = parameter.detach().chunk(size)[rank].clone()
        setattr(local, n, torch.nn.Parameter(own))
    local.num_experts, local._is_expert_parallel = total // size, True
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    call, pairs = Experts(local, mesh["ep"], mesh["tp"]), []
    for n, count in enumerate(counts[rank:] + counts[:rank]):
        generator = torch.Generator().manual_seed(10 * n + rank)
        x = torch.randn(count, 32, generator=generator, requires_grad=True)
        ids = torch.rand(count, total, generator=generator).argsort(-1)[:, :2]
        weights = torch.rand(count, 2, generator=generator, requires_grad=True)
        grad = torch.randn(count, 32, generator=generator)
        expected = single(x, ids, weights) + 0 * (x + weights.sum())  # no tokens: a gradient, too
        results = [
            (y.detach(), *torch.autograd.grad(y, [x, weights], grad))
            for y in (call(x, ids, weights), expected)
        ]
        pairs += zip(*results, strict=True)
    return error_of(pairs)
