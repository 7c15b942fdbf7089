"""Attention over a sequence that is sharded among ranks: fused, and in plain torch beside it.

    torchrun --nproc-per-node=4 examples/sp_attention.py [--lengths 4096 8192] [--full]
        [--layout zigzag] [--runs 10] [--figure attention.png]

Every rank holds its rows of q, k and v and wants its rows of the result. The fused operator starts
on its own keys and goes on with the others' as they arrive; the reference gathers all of them, in
fp32, and writes every position down. Results and log-sum-exps must agree. Without a GPU ranks are
processes of a CPU, where torch computes what the kernel would: right, and slow.
"""

import argparse
import os
import sys
from functools import partial

import torch
import torch.distributed as dist

import tileweave as tw
from tileweave import ops
from tileweave.ops.core.groups import group_of
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.measure import interleaved, largest

TOLERANCE = 2e-2
"""Largest difference of the results, and of the norms of one row and head; numbers are N(0, 1)."""


def join() -> Group:
    if torch.cuda.is_available():
        tw.init()
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return group_of("")


def random_shards(options: argparse.Namespace, length: int, group: Group) -> list[torch.Tensor]:
    """This rank's rows of q, k and v of random sequences."""
    generator = torch.Generator(group.device).manual_seed(group.rank)
    rows = length // group.world_size
    return [
        torch.randn(
            options.batch, rows, heads, options.head_dim, generator=generator, device=group.device
        ).bfloat16()
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]


def contenders(options: argparse.Namespace, group: Group) -> dict:
    """By name, what computes the result and the log-sum-exp of a rank's q, k and v."""
    asked = {"causal": not options.full, "layout": options.layout, "return_lse": True}
    strategy = "fused" if group.device.type == "cuda" else "nccl"
    return {
        "fused": partial(ops.sp_attention, **asked, strategy=strategy),
        "reference": ops.SequenceParallelAttention(**asked, reference=True),
    }


def errors(found: tuple, right: tuple) -> dict[str, float]:
    """Return the largest error of the result, of a row and head relative to its norm, and of the
    log-sum-exp; infinite where a value is not a number."""
    (out, lse), (right_out, right_lse) = ([x.float() for x in pair] for pair in (found, right))
    difference = out - right_out
    worst = {
        "largest error": difference.abs().max(),
        "relative error of a row": (difference.norm(dim=-1) / right_out.norm(dim=-1)).max(),
        "error of log-sum-exp": (lse - right_lse).abs().max(),
    }
    return {name: error.nan_to_num(nan=torch.inf).item() for name, error in worst.items()}


def compare(options: argparse.Namespace, length: int, group: Group) -> tuple[bool, dict]:
    """Return whether both agree on all ranks, and the ms of each on the slowest rank."""
    attend = contenders(options, group)
    q, k, v = random_shards(options, length, group)
    worst = largest(errors(*(call(q, k, v) for call in attend.values())), group)
    ms = interleaved(
        {name: lambda given, call=call: call(*given) for name, call in attend.items()},
        [(q, k, v)],
        group,
        warmups=1,
        runs=options.runs,
    )
    if group.rank == 0:
        kind = "full" if options.full else f"causal {options.layout}"
        print(
            f"{options.batch} x {length} {kind} on {group.world_size}: fused {ms['fused']:.3f} ms, "
            f"reference {ms['reference']:.3f} ms ({ms['reference'] / ms['fused']:.1f}x), "
            + ", ".join(f"{name} {error:.1e}" for name, error in worst.items()),
            flush=True,
        )
    return all(error <= TOLERANCE for error in worst.values()), ms


def draw(file: str, title: str, times: dict[int, dict[str, float]]) -> None:
    """Time over length, of both, as a PNG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print('no figure: matplotlib is not installed; `pip install "tileweave[plot]"`')
        return
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    ax = figure.subplots()
    for name, marker in (("fused", "o"), ("reference", "s")):
        ax.plot(list(times), [ms[name] for ms in times.values()], marker=marker, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(list(times), map(str, times))
    ax.minorticks_off()
    ax.set_xlabel("rows of all ranks")
    ax.set_ylabel("ms")
    ax.set_title(title, fontsize=9)
    ax.grid(alpha=0.3)
    ax.legend()
    FigureCanvasAgg(figure).print_png(file)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", help="rows of a sequence, of all ranks together")
    add("--batch", type=int, default=1, help="sequences")
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--layout", default="zigzag", help="contiguous or zigzag")
    add("--full", action="store_true", help="every row sees all; default: causal")
    add("--runs", type=int, default=10)
    add("--figure", metavar="OUT", help="draw both times: .png")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    group = join()
    cuda = group.device.type == "cuda"
    if not cuda and group.rank == 0:
        print("no GPU: ranks are processes of the CPU; these times say nothing of the kernel")
    times, right = {}, True
    for length in options.lengths or ((4096, 8192, 16384) if cuda else (240, 480)):
        agree, times[length] = compare(options, length, group)
        right &= agree
    if group.rank == 0:
        if options.figure:
            title = f"{group.world_size} ranks, {'full' if options.full else options.layout}"
            draw(options.figure, title, times)
        print("right" if right else f"wrong: an error above {TOLERANCE:.0e}")
    if cuda:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
