"""Time ops.expert_mlp with overlapped kernels beside its separate steps, in one run.

    torchrun --nproc-per-node=4 benchmarks/expert_mlp.py [--tokens 128 512 1024 2048 4096]
        [--case EXPERTS_PER_RANK K H I] [--rep 50]

``--case`` may be repeated. Times are in us: medians of ``--rep`` calls, of the slowest rank. The
ratio is that of the times, separate / fused. Experts are chosen at random with equal probabilities.
The first result of the overlapped kernels is compared with that of the separate steps.
"""

import argparse
import statistics
import time

import torch

import tileweave as tw
from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of

HEAP_BYTES = 24 << 30
CASES = [(8, 8, 7168, 2048), (16, 8, 4096, 1536)]
"""Experts of a rank, k, H and I: DeepSeek-V3 and Qwen3-235B on 4 to 8 ranks."""
ERROR = 2e-2


def times_us(call, rep: int) -> list[float]:
    """Return the times of calls, each between two events. All ranks start a call together."""
    group, times = group_of(""), []
    for _ in range(rep):
        group.meet("time")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # the host enqueues the call meanwhile
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return times


@torch.no_grad()
def compare(tokens: int, case: tuple[int, ...], rep: int) -> str:
    """Return a row of the table."""
    per_rank, k, H, width = case
    group = group_of("")
    options = {"device": group.device, "dtype": torch.bfloat16}
    torch.manual_seed(group.rank)
    x = torch.randn(tokens, H, **options)
    w_gate_up = torch.randn(per_rank, 2 * width, H, **options) * H**-0.5
    w_down = torch.randn(per_rank, H, width, **options) * width**-0.5
    scores = torch.rand(tokens, per_rank * group.world_size, device=group.device)
    weights, ids = scores.topk(k, -1)
    results, medians = {}, {}
    for strategy in ("separate", "fused"):

        def call(strategy=strategy):
            return ops.expert_mlp(x, ids.int(), weights, w_gate_up, w_down, strategy=strategy)

        results[strategy] = call().float()
        times_us(call, 5)
        own = torch.tensor([statistics.median(times_us(call, rep))], device=group.device)
        medians[strategy] = nccl.all_gather(own, group).max().item()
    expected = results["separate"]
    error = ((results["fused"] - expected).norm() / expected.norm()).item()
    if not error <= ERROR:
        raise SystemExit(f"{case}, {tokens} tokens: relative error {error:.1e}")
    separate, fused = medians["separate"], medians["fused"]
    shape = " ".join(f"{n:6}" for n in (*case, tokens))
    return f"{shape} {separate:10.1f} {fused:10.1f} {separate / fused:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096])
    parser.add_argument("--case", type=int, nargs=4, action="append")
    parser.add_argument("--rep", type=int, default=50)
    options = parser.parse_args()
    tw.init(heap_bytes=HEAP_BYTES)
    is_first = group_of("").rank == 0
    if is_first:
        print(
            time.strftime("%F %T"), torch.cuda.get_device_name(), group_of("").world_size, "ranks"
        )
        print("   E/W      k      H      I      T   separate      fused    ratio")
    for case in options.case or CASES:
        for tokens in options.tokens:
            row = compare(tokens, tuple(case), options.rep)
            if is_first:
                print(row, flush=True)


if __name__ == "__main__":
    main()
