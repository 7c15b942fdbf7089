"""Functions that tests/engines/sglang.py runs on each rank."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from sglang.srt import plugins
from sglang.srt.layers import layernorm_sp
from torch.nn import functional

from tests.integrations.torch_on_ranks import error_of
from tileweave.integrations.torch import disable, explain

HIDDEN, INNER = 16, 32


def load(names: str | None) -> bool:
    """Load the plug-ins that SGLANG_PLUGINS names, or all, as each process of SGLang does. Return
    whether the hooks are in place."""
    os.environ.pop("SGLANG_PLUGINS", None)
    if names is not None:
        os.environ["SGLANG_PLUGINS"] = names
    plugins._plugins_loaded = False
    plugins.load_plugins()
    return hasattr(layernorm_sp.initialize_layernorm_sp, "__wrapped__")


def mlp(architecture: str, count: int) -> dict:
    """Compare an MLP of SGLang, with sequence parallelism, with one process. Return the calls of
    TileWeave, too.

    Args:
        architecture: of the model that SGLang loads.
        count: the number of tokens.
    """
    disable()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = SimpleNamespace(device_group=dist.group.WORLD, world_size=size, rank_in_group=rank)
    group.all_gather_into_tensor = dist.all_gather_into_tensor
    torch.manual_seed(0)
    x = torch.randn(count, HIDDEN, dtype=torch.bfloat16)
    up, down = (torch.randn(*shape).bfloat16() for shape in ((INNER, HIDDEN), (HIDDEN, INNER)))
    layers = [
        SimpleNamespace(weight=weight, tp_group=group)
        for weight in (up.chunk(size)[rank], down.chunk(size, 1)[rank].contiguous())
    ]
    parallel = SimpleNamespace(tp_group=group, enable_layernorm_sp=True)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    # What decides whether a layer is dense imports torchvision.
    replaced = {"get_parallel": lambda: parallel, "sp_fused_matmul_eligible": lambda _: True}
    with mock.patch.multiple(layernorm_sp, **replaced):
        layernorm_sp.initialize_layernorm_sp(model_config=config)
        shard = layernorm_sp.sp_entry_scatter(x)
        h = functional.relu(layernorm_sp.column_parallel_g_matmul(layers[0], shard, None))
        shard = layernorm_sp.row_parallel_gbar_matmul(layers[1], h, None)
        y = layernorm_sp.sp_exit_gather(shard, count)
    expected = functional.relu(x @ up.t()) @ down.t()
    return {
        "error": error_of([(y, expected)]),
        "rows": len(shard) * size,
        "calls": [call.name for call in explain().calls],
    }
