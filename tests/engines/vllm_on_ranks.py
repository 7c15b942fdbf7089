"""Functions that tests/engines/vllm.py runs on each rank."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional
from vllm import plugins
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import linear

from tests.integrations.torch_on_ranks import error_of
from tileweave import ops
from tileweave.integrations import vllm

COLUMNS, HIDDEN = 16, 24


def load(names: str | None) -> list[str]:
    """Load the plug-ins that VLLM_PLUGINS names, or all, as each process of vLLM does. Return the
    classes that replace layers."""
    os.environ.pop("VLLM_PLUGINS", None)
    if names is not None:
        os.environ["VLLM_PLUGINS"] = names
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    return [f"{cls.__module__}.{cls.__name__}" for cls in op_registry_oot.values()]


def layer(shape: tuple[int, ...], strategy: str | None, compiles: bool, options: dict) -> dict:
    """Compare a layer of vLLM with one process, and return the rows of TileWeave's calls.

    Args:
        shape: of the input, without its columns.
        strategy: what TileWeave would use; None if vLLM's own layer computes the call.
        options: arguments of the layer.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
            parallel_state.init_distributed_environment(size, rank, local_rank=rank, backend="gloo")
            parallel_state.initialize_model_parallel(size)
    torch.manual_seed(0)
    weight, bias = torch.randn(HIDDEN, COLUMNS), torch.randn(HIDDEN)
    x = torch.randn(*shape, COLUMNS)
    module = linear.RowParallelLinear(COLUMNS, HIDDEN, params_dtype=weight.dtype, **options)
    module.weight.weight_loader(module.weight, weight)
    module.bias.weight_loader(module.bias, bias)
    module.quant_method.process_weights_after_loading(module)

    chosen = mock.Mock(return_value=ops.Strategy(strategy, "the test sets it"))
    fused = mock.Mock(wraps=ops.matmul_all_reduce)
    options = {"backend": "aot_eager", "dynamic": True, "fullgraph": True}
    forward = torch.compile(module, **options) if compiles else module
    vllm._is_fused.clear()
    with mock.patch.multiple(ops, strategy_of=chosen, matmul_all_reduce=fused):
        with torch.inference_mode():
            y, own_bias = forward(x.chunk(size, -1)[rank] if module.input_is_parallel else x)
    expected = functional.linear(x, weight, None if module.skip_bias_add else bias)
    assert (own_bias is module.bias) == module.skip_bias_add
    rows = [len(call.args[0]) for call in fused.call_args_list]
    return {"error": error_of([(y, expected)]), "decides": chosen.called, "rows": rows}
