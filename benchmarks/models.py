"""Time layers of Llama-70B at many sizes by torch.compile: NCCL, async-TP, TileWeave by one line.

    torchrun --nproc-per-node=2 benchmarks/models.py [--parts prefill train decode]
        [--rows 64 1024 8192] [--batches 1 16 256] [--layers 4] [--runs 12]

| part | what runs | collectives |
|---|---|---|
| prefill | forward of one sequence without gradients | gathers and scatters of its rows |
| train | forward and backward | the same |
| decode | forward of one token of each sequence, with a cache, as a CUDA graph | all-reduces |

The modes are those of llama_layers.py; ``async-tp`` fuses no all-reduce. All run in the same
process, so the clock of the GPUs is about the same. The times in ms are medians of ``--runs`` calls
of the slowest rank.

- ``best``: the faster of the other modes divided by ``tileweave``; above 1, TileWeave is faster
- ``fused``: collectives that TileWeave's operators replace in the compiled graphs, 0 is a fault
- ``error``: the largest relative error of all modes, compared with eager torch; 5 % is a fault

Without GPUs, tiny layers run with gloo, which only tests this file.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config as inductor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import llama_layers as llama
from benchmarks.llama_layers import ERROR, GPU, MODES, Model, Products, Step
from tileweave.integrations.torch import explain

PARTS = ("prefill", "train", "decode")


def decoding(cache: Tensor) -> Products:
    """Return the products of a decode step, and attention to a cache, (2, B, Hkv, keys, D)."""
    k, v = cache

    def attend(q: Tensor, *_: Tensor) -> Tensor:
        q = q.unsqueeze(2)  # (B, Hq, 1, D)
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).squeeze(2)

    def added(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(x @ w.t(), "sum", dist.group.WORLD)

    return Products(lambda x, w: x @ w.t(), added, attend)


def calls_of(
    part: str, size: int, model: Model, options: argparse.Namespace
) -> tuple[Callable[[], Any], Callable[[], Callable[[], Any]]]:
    """Return a call in eager mode, and a function that returns the same call, compiled."""
    products, step = llama.TORCH, Step.of_rows(lambda x: model(x, products), model, size)
    if part == "train":
        return step.train, lambda: step._replace(forward=torch.compile(step.forward)).train
    x = step.x
    if part == "decode":
        weights, heads = model.layers[0].qkv, options.kv_heads // dist.get_world_size()
        cache = weights.new_empty(2, size, heads, options.keys, options.head_dim).normal_()
        torch.manual_seed(size)  # all ranks have the same tokens
        products, x = decoding(cache), weights.new_empty(size, weights.shape[1]).normal_()

    def run(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [forward(x)]

    def compiled() -> Callable[[], list[Tensor]]:
        call = partial(run, torch.compile(step.forward))
        return graph_of(call) if part == "decode" and GPU else call

    return partial(run, step.forward), compiled


def graph_of(call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Return a replay of a call, captured in a CUDA graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def measure(part: str, size: int, model: Model, options: argparse.Namespace) -> dict[str, float]:
    """Return the time of each mode, and the largest error."""
    eager, compiled = calls_of(part, size, model, options)
    expected, row = eager(), {"error": 0.0}
    for mode in MODES:
        torch._dynamo.reset()
        with llama.operators_of(mode), inductor.patch(force_disable_caches=True):
            call = compiled()
            error = llama.error_of(call(), expected)
            row["fused"] = sum(len(graph.fused) for graph in explain().graphs)  # of the last mode
            row[mode] = llama.milliseconds(call, options.runs)
        row["error"] = max(row["error"], error)
    return row


def show(*cells: Any) -> None:
    """Print a row of a table on rank 0."""
    if dist.get_rank() == 0:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1024, 8192] if GPU else [64])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 256] if GPU else [2])
    parser.add_argument("--keys", type=int, default=2048 if GPU else 16)
    llama.add_layer_options(parser)
    return parser.parse_args()


def main() -> None:
    options, faults = parsed(), []
    with llama.ranks(llama.HEAP_BYTES):
        torch.manual_seed(dist.get_rank())
        model = Model(options)
        show("part", "size", *(f"{mode}, ms" for mode in MODES), "best", "fused", "error")
        show(*["---"] * (len(MODES) + 5))
        for part in options.parts:
            for size in options.batches if part == "decode" else options.rows:
                row = measure(part, size, model, options)
                best = min(row[mode] for mode in MODES[:-1]) / row["tileweave"]
                times = (f"{row[mode]:.3f}" for mode in MODES)
                show(part, size, *times, f"{best:.2f}", row["fused"], f"{row['error']:.1e}")
                if not row["error"] < ERROR:
                    faults.append(f"{part}, {size}: relative error {row['error']:.1e}")
                if not row["fused"]:
                    faults.append(f"{part}, {size}: no collective was fused")
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    main()
