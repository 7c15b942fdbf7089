"""Time layers of Qwen3-30B-A3B in transformers: its implementations of experts, and TileWeave's.

    torchrun --nproc-per-node=2 benchmarks/qwen3_layer.py [--tokens 16 256 4096] [--layers 1]
        [--runs 12]

All ranks have the same tokens and a part of the heads and of the experts. Each implementation loads
the same random weights. The times in ms are medians of ``--runs`` forward passes without gradients
of the slowest rank; the first pass of each is not timed.

- ``best``: the faster of transformers' two divided by ``tileweave``; above 1, TileWeave is faster
- ``error``: the largest relative error to ``all_reduce``; 5 % is a fault

Without GPUs, tiny layers run with gloo, which only tests this file.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModel, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.llama_layers import ERROR, GPU, HEAP_BYTES, error_of, milliseconds, ranks
from benchmarks.models import show
from tileweave.integrations.transformers import enable

IMPLEMENTATIONS = ("all_reduce", "all_to_all", "tileweave")
SIZES = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
} if GPU else {
    "hidden_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)


def saved(folder: str, layers: int) -> None:
    """Save random weights, the same for all ranks."""
    scale = SIZES["hidden_size"] ** -0.5  # experts change the result as much as the residual does
    sizes = {**SIZES, "num_hidden_layers": layers, "vocab_size": 64, "initializer_range": scale}
    config = Qwen3MoeConfig(**sizes)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModel.from_config(config, dtype=DTYPE).save_pretrained(folder)
    dist.barrier()


def loaded(folder: str, implementation: str) -> nn.Module:
    """Return the model whose experts have this implementation."""
    count = dist.get_world_size()
    config = DistributedConfig(tp_size=count, ep_size=count, ep_implementation=implementation)
    if implementation == "tileweave":
        enable()
    return AutoModel.from_pretrained(folder, dtype=DTYPE, distributed_config=config)


def output(model: nn.Module, x: Tensor) -> Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 4096] if GPU else [8])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--runs", type=int, default=12 if GPU else 1)
    options, faults = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as own, ranks(HEAP_BYTES), torch.no_grad():
        folder = [own]
        dist.broadcast_object_list(folder)  # that of rank 0
        saved(folder[0], options.layers)
        models = [loaded(folder[0], name) for name in IMPLEMENTATIONS]
        show("tokens", *(f"{name}, ms" for name in IMPLEMENTATIONS), "best", "error")
        show(*["---"] * (len(IMPLEMENTATIONS) + 3))
        for tokens in options.tokens:
            torch.manual_seed(tokens)
            x = torch.randn(1, tokens, SIZES["hidden_size"]).to(DEVICE, DTYPE)
            calls = [partial(output, model, x) for model in models]
            expected, *others = [call() for call in calls]
            error = error_of(others, [expected] * len(others))
            *times, ours = [milliseconds(call, options.runs) for call in calls]
            cells = (f"{time:.3f}" for time in (*times, ours))
            show(tokens, *cells, f"{min(times) / ours:.2f}", f"{error:.1e}")
            if not error < ERROR:
                faults.append(f"{tokens} tokens: relative error {error:.1e}")
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
