"""Time ops.expert_mlp beside its grouped GEMMs and its exchanges.

    torchrun --nproc-per-node=4 benchmarks/expert_mlp.py [--tokens 128 512 1024 2048 4096]
        [--case EXPERTS_PER_RANK K H I] [--turns 5]

``--case`` may be repeated. Times are in us, of a call in a CUDA graph of 4 calls: medians of turns,
of the slowest rank. Before each measurement the GPU computes as many GEMMs as the layer has in one:
under load the clock is lower. ``ratio`` is ``layer`` divided by the larger one of ``GEMMs`` and
``exchange``, which is ``dispatch`` and ``combine``. Experts are chosen at random with equal
probabilities.
"""

import argparse
import statistics
import time

import torch
from graph_times import graph_us

import tileweave as tw
from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of

HEAP_BYTES = 24 << 30
CASES = [(8, 8, 7168, 2048), (16, 8, 4096, 1536)]
"""Experts of a rank, k, H and I: DeepSeek-V3 and Qwen3-235B on 4 to 8 ranks."""
CALLS, REPLAYS = 4, 20
"""Calls of a graph, and its replays in a turn."""
COLUMNS = "layer", "GEMMs", "exchange"


@torch.no_grad()
def compare(tokens: int, case: tuple[int, ...], turns: int) -> str:
    """Return a row of the table."""
    per_rank, k, H, width = case
    group = group_of("")
    num_experts = per_rank * group.world_size
    options = {"device": group.device, "dtype": torch.bfloat16}
    torch.manual_seed(group.rank)
    x = torch.randn(tokens, H, **options)
    w_gate_up = torch.randn(per_rank, 2 * width, H, **options) * H**-0.5
    w_down = torch.randn(per_rank, H, width, **options) * width**-0.5
    weights, ids = torch.rand(tokens, num_experts, device=group.device).topk(k, -1)
    ids = ids.int()

    def layer() -> torch.Tensor:
        return ops.expert_mlp(x, ids, weights, w_gate_up, w_down)

    def dispatched() -> tuple[torch.Tensor, torch.Tensor, ops.DispatchHandle]:
        return ops.dispatch(x, ids, weights, num_experts=num_experts, clear_rest=False)

    rows, offsets, handle = dispatched()

    def gemms() -> torch.Tensor:
        hidden = ops.grouped_matmul(rows, w_gate_up, offsets, epilogue="swiglu", clear_rest=False)
        return ops.grouped_matmul(hidden, w_down, offsets, clear_rest=False)

    y = gemms()

    def exchange() -> torch.Tensor:
        dispatched()
        return ops.combine(y, handle)

    calls = dict(zip(COLUMNS, (layer, gemms, exchange), strict=True))
    layer()
    times = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            graph_us(gemms, CALLS, REPLAYS)
            group.meet(name)
            times[name].append(graph_us(call, CALLS, REPLAYS))
    own = torch.tensor([statistics.median(of_call) for of_call in times.values()])
    slowest = nccl.all_gather(own.to(group.device), group).view(group.world_size, -1).amax(0)
    us = dict(zip(times, slowest.tolist(), strict=True))
    ratio = us["layer"] / max(us["GEMMs"], us["exchange"])
    shape = " ".join(f"{n:6}" for n in (*case, tokens))
    columns = " ".join(f"{us[name]:10.1f}" for name in COLUMNS)
    return f"{shape} {columns} {ratio:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--case", type=int, nargs=4, action="append")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    tw.init(heap_bytes=HEAP_BYTES)
    is_first = group_of("").rank == 0
    if is_first:
        print(
            time.strftime("%F %T"), torch.cuda.get_device_name(), group_of("").world_size, "ranks"
        )
        columns = " ".join(f"{name:>10}" for name in COLUMNS)
        print(f"   E/W      k      H      I      T {columns}    ratio")
    for case in options.case or CASES:
        for tokens in options.tokens:
            row = compare(tokens, tuple(case), options.turns)
            if is_first:
                print(row, flush=True)


if __name__ == "__main__":
    main()
