"""Measure the exchanges of ops.ulysses_attention, and whether overlapping them saves time.

    torchrun --nproc-per-node=2 benchmarks/ulysses.py [--lengths 16384 65536] [--batch 1]
        [--heads 32] [--kv-heads 8] [--head-dim 128] [--full] [--groups 2 4] [--backend cudnn]

The following run in turn; a time is the largest of the medians of all ranks, in ms:

- the operator with each transport
- its parts alone: the exchange of q, k and v; attention; the exchange of the result
- the operator by groups of heads: group i + 1 is exchanged in another stream during the attention
  of group i

Every result is compared with that of the operator. Without a GPU, small sequences run with gloo in
sequence, which only tests this file.
"""

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileweave as tw
from tileweave import ops
from tileweave.ops.attention.ulysses import attend, exchanges_of, problem_of
from tileweave.ops.collectives.all_to_all import AllToAll
from tileweave.ops.collectives.transport import auto_transports
from tileweave.ops.core.groups import group_of
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.host.measure import interleaved

GPU = torch.cuda.is_available()
TRANSPORTS = ("auto", "nccl") if GPU else ("auto",)
BACKENDS = {
    "any": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HEAP_BYTES = 16 << 30
ERROR = 1e-2
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split_heads(x: torch.Tensor, ranks: int, groups: int) -> list[torch.Tensor]:
    """Copy the heads of x to groups. Each group has the same number of heads of every rank."""
    split = x.unflatten(2, (ranks, groups, -1)).movedim(3, 0).contiguous()
    return [*split.flatten(3, 4)]


def join_heads(groups: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """Invert ``split_heads``."""
    return torch.stack([x.unflatten(2, (ranks, -1)) for x in groups], 3).flatten(2, 4)


class Streams:
    """The stream of the caller, and a side stream whose kernels have priority on free SMs."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream(priority=-1) if GPU else None

    def wait(self, event: object | None) -> None:
        """Make the current stream wait for an event."""
        if GPU:
            torch.cuda.current_stream().wait_event(event)

    def record(self) -> object | None:
        """Return an event at the end of the current stream."""
        return torch.cuda.current_stream().record_event() if GPU else None

    def use_side(self) -> contextlib.AbstractContextManager:
        """Make the side stream current."""
        return torch.cuda.stream(self.side) if GPU else contextlib.nullcontext()


def attention_in_groups(
    inputs: Inputs, streams: Streams, groups: int, causal: bool, transport: str
) -> torch.Tensor:
    """Compute ``ulysses_attention`` by groups of heads.

    The exchanges of all groups are in one stream, in the same order on all ranks. Their inputs and
    results stay alive until the streams have joined.
    """
    ranks = group_of("").world_size
    copies = [split_heads(x, ranks, groups) for x in inputs]
    begin = streams.record()
    exchanged, ready, outs, results = [], [], [], []
    with streams.use_side():
        streams.wait(begin)
        for group in zip(*copies, strict=True):
            exchanged.append([ops.all_to_all(x, 2, 1, transport=transport) for x in group])
            ready.append(streams.record())
    for group, event in zip(exchanged, ready, strict=True):
        streams.wait(event)
        outs.append(attend(*group, causal, None))
        attended = streams.record()
        with streams.use_side():
            streams.wait(attended)
            results.append(ops.all_to_all(outs[-1], 1, 2, transport=transport))
            end = streams.record()
    streams.wait(end)
    return join_heads(results, ranks)


def compile_all(inputs: Inputs, causal: bool, groups: list[int]) -> None:
    """Compile the exchanges of all heads and of the groups of heads in parallel."""
    ranks = group_of("").world_size
    problems = []
    for count in (1, *groups):
        if inputs[1].shape[2] % (ranks * count) == 0:
            q, k, v = (split_heads(x.to("meta"), ranks, count)[0] for x in inputs)
            problems += exchanges_of(problem_of(q, k, v, causal, None, ranks))
    compile_ahead(
        AllToAll.steps(
            problem, auto_transports(problem, AllToAll)[0] if transport == "auto" else transport
        )
        for problem in dict.fromkeys(problems)
        for transport in TRANSPORTS
        if transport != "nccl"
    )


def implementations(
    options: argparse.Namespace, causal: bool, inputs: Inputs
) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    """Return the functions to be timed, by name."""
    ranks, streams = group_of("").world_size, Streams()
    exchanged = [ops.all_to_all(x, 2, 1) for x in inputs]
    out = attend(*exchanged, causal, None)

    def exchange(_: Inputs, transport: str) -> torch.Tensor:
        q, _, _ = (ops.all_to_all(x, 2, 1, transport=transport) for x in inputs)
        return q

    functions: dict[str, Callable[[Inputs], torch.Tensor]] = {}
    for t in TRANSPORTS:
        functions[f"operator {t}"] = lambda qkv, t=t: ops.ulysses_attention(
            *qkv, causal=causal, transport=t
        )
        functions[f"exchange of q, k, v {t}"] = partial(exchange, transport=t)
        functions[f"exchange of result {t}"] = lambda _, t=t: ops.all_to_all(out, 1, 2, transport=t)
        for groups in options.groups:
            if inputs[1].shape[2] % (ranks * groups) == 0:
                functions[f"{groups} groups {t}"] = partial(
                    attention_in_groups, streams=streams, groups=groups, causal=causal, transport=t
                )
    functions["attention"] = lambda _: attend(*exchanged, causal, None)
    return functions


def measure(options: argparse.Namespace, length: int) -> dict[str, float]:
    """Return the time of each function in ms. Exit if a result is wrong."""
    group, causal = group_of(""), not options.full
    device = torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
    torch.manual_seed(group.rank)
    shape = (options.batch, length // group.world_size)
    inputs = tuple(
        torch.randn(
            *shape, heads, options.head_dim, device=device,
            dtype=torch.bfloat16 if GPU else torch.float32,
        )
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )  # fmt: skip
    if GPU:
        compile_all(inputs, causal, options.groups)
    expected = ops.ulysses_attention(*inputs, causal=causal).float()

    def check(name: str, _: Inputs, result: torch.Tensor) -> None:
        if not name.startswith(("operator", *(f"{n} groups" for n in options.groups))):
            return
        error = ((result.float() - expected).norm() / expected.norm()).item()
        if not error <= ERROR:
            raise SystemExit(f"rank {group.rank}: {name}: relative error {error:.1e}")

    return interleaved(
        implementations(options, causal, inputs), [inputs], group, runs=options.runs, after=check,
        title=f"{length} rows",
    )  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536] if GPU else [64])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128 if GPU else 8)
    parser.add_argument("--groups", type=int, nargs="*", default=[2])
    parser.add_argument("--backend", choices=BACKENDS, default="any", help="attention of PyTorch")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    if GPU:
        tw.init(heap_bytes=HEAP_BYTES)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    backend = BACKENDS[options.backend]
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        for length in options.lengths:
            times = measure(options, length)
            if group_of("").rank == 0:
                print(f"{length} rows, {'full' if options.full else 'causal'}", flush=True)
                for name, ms in times.items():
                    print(f"  {name:32} {ms:8.3f} ms", flush=True)
    if GPU:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
