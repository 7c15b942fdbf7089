"""What ops.ulysses_attention spends on its exchanges, and whether it pays to overlap them.

    torchrun --nproc-per-node=2 benchmarks/ulysses.py [--lengths 16384 65536] [--batch 1]
        [--heads 32] [--kv-heads 8] [--head-dim 128] [--full] [--groups 2 4] [--backend cudnn]

Interleaved, of each rank the median, of these the largest, in ms: the operator by each transport;
its parts alone (q, k and v to heads; attention; the result back); and the operator by groups of
heads, where group i + 1 is exchanged in another stream while group i is attended to. Every result
of these is compared with the operator's. Without a GPU small ones run with gloo, one after the
other: that tries this file.
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
from tileweave.ops.collectives.transport import fastest
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.host.measure import interleaved

GPU = torch.cuda.is_available()
TRANSPORTS = ("auto", "copy_engine", "nccl") if GPU else ("auto",)
BACKENDS = {
    "any": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
HEAP_BYTES = 16 << 30
ERROR = 1e-2
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def parts(x: torch.Tensor, ranks: int, groups: int) -> list[torch.Tensor]:
    """The heads of x in groups, of which each has as many of every rank's. Copied."""
    each = x.unflatten(2, (ranks, groups, -1)).movedim(3, 0).contiguous()
    return [*each.flatten(3, 4)]


def together(groups: list[torch.Tensor], ranks: int) -> torch.Tensor:
    """The inverse of ``parts``."""
    return torch.stack([x.unflatten(2, (ranks, -1)) for x in groups], 3).flatten(2, 4)


class Beside:
    """Two streams: the caller's, and one whose kernels come first where an SM becomes free."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream(priority=-1) if GPU else None

    def wait(self, of: object | None) -> None:
        """What follows in the current stream comes after an event."""
        if GPU:
            torch.cuda.current_stream().wait_event(of)

    def reached(self) -> object | None:
        """Where the current stream is."""
        return torch.cuda.current_stream().record_event() if GPU else None

    def aside(self) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(self.side) if GPU else contextlib.nullcontext()


def in_groups(
    given: Given, beside: Beside, groups: int, causal: bool, transport: str
) -> torch.Tensor:
    """``ulysses_attention`` by groups of heads. Exchanges of all groups are in one stream, in one
    order on all ranks. What they take and give lives until both streams have met again."""
    ranks = group_of("").world_size
    copied = [parts(x, ranks, groups) for x in given]
    begin = beside.reached()
    whole, ready, outs, results = [], [], [], []
    with beside.aside():
        beside.wait(begin)
        for group in zip(*copied, strict=True):
            whole.append([ops.all_to_all(x, 2, 1, transport=transport) for x in group])
            ready.append(beside.reached())
    for group, event in zip(whole, ready, strict=True):
        beside.wait(event)
        outs.append(attend(*group, causal, None))
        done = beside.reached()
        with beside.aside():
            beside.wait(done)
            results.append(ops.all_to_all(outs[-1], 1, 2, transport=transport))
            last = beside.reached()
    beside.wait(last)
    return together(results, ranks)


def compile_all(given: Given, causal: bool, groups: list[int]) -> None:
    """The exchanges of the whole and of its groups of heads, many at a time."""
    ranks = group_of("").world_size
    found = []
    for count in (1, *groups):
        if given[1].shape[2] % (ranks * count) == 0:
            q, k, v = (parts(x.to("meta"), ranks, count)[0] for x in given)
            found += exchanges_of(problem_of(q, k, v, causal, None, ranks))
    compile_ahead(
        OPERATORS[problem.op].steps(
            problem, fastest(problem)[0] if transport == "auto" else transport
        )
        for problem in dict.fromkeys(found)
        for transport in TRANSPORTS
        if transport != "nccl"
    )


def contenders(
    options: argparse.Namespace, causal: bool, given: Given
) -> dict[str, Callable[[Given], torch.Tensor]]:
    ranks, beside = group_of("").world_size, Beside()
    whole = [ops.all_to_all(x, 2, 1) for x in given]
    out = attend(*whole, causal, None)

    def to_heads(_: Given, transport: str) -> torch.Tensor:
        q, _, _ = (ops.all_to_all(x, 2, 1, transport=transport) for x in given)
        return q

    found: dict[str, Callable[[Given], torch.Tensor]] = {}
    for t in TRANSPORTS:
        found[f"whole {t}"] = lambda g, t=t: ops.ulysses_attention(*g, causal=causal, transport=t)
        found[f"to heads {t}"] = partial(to_heads, transport=t)
        found[f"back {t}"] = lambda _, t=t: ops.all_to_all(out, 1, 2, transport=t)
        for groups in options.groups:
            if given[1].shape[2] % (ranks * groups) == 0:
                found[f"{groups} groups {t}"] = partial(
                    in_groups, beside=beside, groups=groups, causal=causal, transport=t
                )
    found["attention"] = lambda _: attend(*whole, causal, None)
    return found


def measure(options: argparse.Namespace, length: int) -> dict[str, float]:
    group, causal = group_of(""), not options.full
    device = torch.device("cuda", torch.cuda.current_device()) if GPU else torch.device("cpu")
    torch.manual_seed(group.rank)
    shape = (options.batch, length // group.world_size)
    given = tuple(
        torch.randn(
            *shape, heads, options.head_dim, device=device,
            dtype=torch.bfloat16 if GPU else torch.float32,
        )
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )  # fmt: skip
    if GPU:
        compile_all(given, causal, options.groups)
    right = ops.ulysses_attention(*given, causal=causal)

    def judge(name: str, _: Given, result: torch.Tensor) -> None:
        if not name.startswith(("whole", *(f"{n} groups" for n in options.groups))):
            return
        error = ((result.float() - right.float()).norm() / right.float().norm()).item()
        if not error <= ERROR:
            raise SystemExit(f"rank {group.rank}: {name}: relative error {error:.1e}")

    return interleaved(
        contenders(options, causal, given), [given], group, runs=options.runs, after=judge,
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
    parser.add_argument("--backend", choices=BACKENDS, default="any", help="of PyTorch")
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    if GPU:
        tw.init(heap_bytes=HEAP_BYTES)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    backend = BACKENDS[options.backend]
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        for length in options.lengths:
            found = measure(options, length)
            if group_of("").rank == 0:
                print(f"{length} rows, {'full' if options.full else 'causal'}", flush=True)
                for name, ms in found.items():
                    print(f"  {name:24} {ms:8.3f} ms", flush=True)
    if GPU:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
