"""Time ops.expert_mlp beside its grouped GEMMs, its exchanges and its overlapped kernels.

    torchrun --nproc-per-node=4 benchmarks/expert_mlp.py [--tokens 128 512 1024 2048 4096]
        [--case EXPERTS_PER_RANK K H I] [--turns 5] [--no-fused]

``--case`` may be repeated. Times are in us, of a call in a CUDA graph of 4 calls: medians of turns,
of the slowest rank. Before each measurement the GPU computes as many GEMMs as the layer has in one:
under load the clock is lower. ``ratio`` is ``separate`` divided by the larger one of ``GEMMs`` and
``exchange``, which is ``dispatch`` and ``combine``. Experts are chosen at random with equal
probabilities. The first result of the overlapped kernels is compared with that of the separate
steps.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from graph_times import graph_us

import tileweave as tw
from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of

HEAP_BYTES = 24 << 30
CASES = [(8, 8, 7168, 2048), (16, 8, 4096, 1536)]
"""Experts of a rank, k, H and I: DeepSeek-V3 and Qwen3-235B on 4 to 8 ranks."""
ERROR = 2e-2
CALLS, REPLAYS = 4, 20
"""Calls of a graph, and its replays in a turn."""
COLUMNS = "separate", "GEMMs", "exchange", "fused"


@torch.no_grad()
def compare(tokens: int, case: tuple[int, ...], turns: int, strategies: Sequence[str]) -> str:
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

    def layer(strategy: str) -> torch.Tensor:
        return ops.expert_mlp(x, ids, weights, w_gate_up, w_down, strategy=strategy)

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

    calls = {strategy: partial(layer, strategy) for strategy in strategies}
    expected = calls["separate"]().float()
    for strategy, call in calls.items():
        error = ((call().float() - expected).norm() / expected.norm()).item()
        if not error <= ERROR:
            raise SystemExit(f"{case}, {tokens} tokens, {strategy}: relative error {error:.1e}")
    calls |= {"GEMMs": gemms, "exchange": exchange}
    times = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            graph_us(gemms, CALLS, REPLAYS)
            group.meet(name)
            times[name].append(graph_us(call, CALLS, REPLAYS))
    own = torch.tensor([statistics.median(of_call) for of_call in times.values()])
    slowest = nccl.all_gather(own.to(group.device), group).view(group.world_size, -1).amax(0)
    us = dict(zip(times, slowest.tolist(), strict=True))
    ratio = us["separate"] / max(us["GEMMs"], us["exchange"])
    shape = " ".join(f"{n:6}" for n in (*case, tokens))
    columns = " ".join(f"{us.get(name, float('nan')):10.1f}" for name in COLUMNS)
    return f"{shape} {columns} {ratio:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--case", type=int, nargs=4, action="append")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-fused", action="store_true", help="without the overlapped kernels")
    options = parser.parse_args()
    tw.init(heap_bytes=HEAP_BYTES)
    is_first = group_of("").rank == 0
    if is_first:
        print(
            time.strftime("%F %T"), torch.cuda.get_device_name(), group_of("").world_size, "ranks"
        )
        columns = " ".join(f"{name:>10}" for name in COLUMNS)
        print(f"   E/W      k      H      I      T {columns}    ratio")
    strategies = ["separate"] if options.no_fused else ["separate", "fused"]
    for case in options.case or CASES:
        for tokens in options.tokens:
            row = compare(tokens, tuple(case), options.turns, strategies)
            if is_first:
                print(row, flush=True)


if __name__ == "__main__":
    main()
