"""Compare fused attention over a sequence that is sharded among ranks with plain torch.

    torchrun --nproc-per-node=4 examples/sp_attention.py [--lengths 4096 8192] [--full]
        [--layout zigzag] [--runs 10] [--figure attention.png]

Every rank has its rows of q, k and v, and computes its rows of the result. The fused operator
starts with its own keys and continues with those of other ranks as they arrive. The reference
gathers all keys in fp32 and compares the position of each with that of each query. Results and
log-sum-exps must agree. Without a GPU the ranks are processes on a CPU, where torch computes the
same result slowly.
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
"""Largest absolute error, and largest relative error of one row and head. Inputs are N(0, 1)."""


def join() -> Group:
    """Join the group of GPUs, or the gloo group of CPU processes."""
    if torch.cuda.is_available():
        tw.init()
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return group_of("")


def random_shards(options: argparse.Namespace, length: int, group: Group) -> list[torch.Tensor]:
    """Return this rank's rows of q, k and v of random sequences."""
    generator = torch.Generator(group.device).manual_seed(group.rank)
    rows = length // group.world_size
    return [
        torch.randn(
            options.batch, rows, heads, options.head_dim, generator=generator, device=group.device
        ).bfloat16()
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    ]


def implementations(options: argparse.Namespace, group: Group) -> dict:
    """Return functions that compute the result and the log-sum-exp of q, k and v, by name."""
    arguments = {"causal": not options.full, "layout": options.layout, "return_lse": True}
    strategy = "fused" if group.device.type == "cuda" else "nccl"
    return {
        "fused": partial(ops.sp_attention, **arguments, strategy=strategy),
        "reference": ops.SequenceParallelAttention(**arguments, reference=True),
    }


def errors(result: tuple, reference: tuple) -> dict[str, float]:
    """Return the largest errors of the result, of a row and head relative to its norm, and of the
    log-sum-exp. An error is infinite if a value is NaN."""
    (out, lse), (exact, exact_lse) = ([x.float() for x in pair] for pair in (result, reference))
    difference = out - exact
    largest_errors = {
        "largest error": difference.abs().max(),
        "relative error of a row": (difference.norm(dim=-1) / exact.norm(dim=-1)).max(),
        "error of log-sum-exp": (lse - exact_lse).abs().max(),
    }
    return {name: error.nan_to_num(nan=torch.inf).item() for name, error in largest_errors.items()}


def compare(options: argparse.Namespace, length: int, group: Group) -> tuple[bool, dict]:
    """Return whether both agree on all ranks, and the time of each in ms on the slowest rank."""
    attend = implementations(options, group)
    q, k, v = random_shards(options, length, group)
    worst = largest(errors(*(call(q, k, v) for call in attend.values())), group)
    ms = interleaved(
        {name: lambda inputs, call=call: call(*inputs) for name, call in attend.items()},
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
    """Draw the times of both over the length, as a PNG."""
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
    add("--full", action="store_true", help="no causal mask")
    add("--runs", type=int, default=10)
    add("--figure", metavar="OUT", help="draw both times: .png")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    group = join()
    cuda = group.device.type == "cuda"
    if not cuda and group.rank == 0:
        print("no GPU: ranks are CPU processes; their times say nothing about the kernel")
    times, passed = {}, True
    for length in options.lengths or ((4096, 8192, 16384) if cuda else (240, 480)):
        agree, times[length] = compare(options, length, group)
        passed &= agree
    if group.rank == 0:
        if options.figure:
            title = f"{group.world_size} ranks, {'full' if options.full else options.layout}"
            draw(options.figure, title, times)
        print("passed" if passed else f"failed: an error above {TOLERANCE:.0e}")
    if cuda:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
