"""Time ops.all_reduce_rms_norm beside a fused kernel without communication, or all-reduce + norm.

    python benchmarks/all_reduce_rms_norm.py                              # one rank: local part
    torchrun --nproc-per-node=2 benchmarks/all_reduce_rms_norm.py         # beside NCCL + norm
        [--tokens 1 8 ...] [--hidden 4096 ...] [--quant fp8_1x128] [--calls 50]

A time is that of one of ``--calls`` calls in a CUDA graph, in us: the median of ``--replays``
replays, on the slowest rank. The calls of a graph follow each other as the layers of a decoder do,
each with the residual of the one before.

- ``torch.compile``: residual and RMSNorm, one kernel; with several ranks after NCCL's all-reduce
- ``flashinfer``: ``flashinfer.norm.fused_add_rmsnorm``, if installed; on one rank only
- ``symm_mem``: ``torch.ops.symm_mem.one_shot_all_reduce`` before the kernel of ``torch.compile``
- ``one_shot``, ``two_shot``: the operator

Every result is compared with that of plain torch. Without a GPU, one small size runs once with
gloo, which only tests this file.
"""

import argparse
import os
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from graph_times import graph_us

import tileweave as tw
from tileweave import ops
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of
from tileweave.ops.norm.all_reduce_rms_norm import OWN, AllReduceRmsNorm
from tileweave.ops.norm.problem import Inputs, NormProblem
from tileweave.ops.norm.reference import normalized
from tileweave.runtime.executor.compile_ahead import compile_ahead
from tileweave.runtime.host.measure import largest

GPU = torch.cuda.is_available()
TOKENS = (1, 2, 6, 16, 32, 64, 138, 256) if GPU else (3,)
HIDDEN = (4096, 6144, 8192, 16384) if GPU else (256,)
EPS = 1e-6
ERROR = 8e-3
HEAP_BYTES = 4 << 30
Pair = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Pair]
"""Function of x, residual and weight: the normalized rows, and the new residual."""


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Pair:
    """Compute residual and RMSNorm as the operator does, for ``torch.compile``."""
    residual = (residual.float() + x.float()).to(x.dtype)
    total = residual.float()
    inverse = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    return (total * inverse * weight.float()).to(x.dtype), residual


def by_operator(strategy: str, quant: str | None) -> Step:
    def step(x, residual, weight) -> Pair:
        out, *_, residual = ops.all_reduce_rms_norm(
            x, residual, weight, EPS, quant=quant, strategy=strategy
        )
        return out, residual

    return step


def flashinfer_step() -> Step | None:
    """Return FlashInfer's fused kernel, which works in place, or None."""
    try:
        from flashinfer.norm import fused_add_rmsnorm
    except ImportError:
        return None

    def step(x, residual, weight) -> Pair:
        fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    return step


def symm_mem_step(shape: tuple[int, int], norm: Step) -> Step:
    """Return torch's one-shot all-reduce of a symmetric copy of x, with the norm after it."""
    import torch.distributed._symmetric_memory as symm_mem

    name = dist.group.WORLD.group_name
    shared = symm_mem.empty(shape, dtype=torch.bfloat16, device="cuda")
    symm_mem.rendezvous(shared, name)

    def step(x, residual, weight) -> Pair:
        shared.copy_(x)  # an engine would let the GEMM write here: not counted apart
        total = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)
        return norm(total, residual, weight)

    return step


def contenders(shape: tuple[int, int], quant: str | None) -> dict[str, Step]:
    group = group_of("")
    torch.compiler.reset()  # after eight shapes of one function it would run eagerly
    norm = torch.compile(add_and_norm, dynamic=False) if GPU else add_and_norm

    def reduced(x, residual, weight) -> Pair:
        total = x.clone()
        nccl.all_reduce(total, group)
        return norm(total, residual, weight)

    steps: dict[str, Step] = {}
    if group.world_size == 1:
        steps["torch.compile"] = norm
        if (fused := flashinfer_step()) is not None:
            steps["flashinfer"] = fused
        steps["one_shot" if GPU else "auto"] = by_operator("one_shot" if GPU else "auto", quant)
        return steps
    steps["torch.compile"] = reduced
    if GPU:
        steps["symm_mem"] = symm_mem_step(shape, norm)
    return steps | {name: by_operator(name, quant) for name in (OWN if GPU else ("auto",))}


def check(name: str, step: Step, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor):
    """Compare the new residual, and without quantization the rows, with plain torch."""
    total = x.clone()
    nccl.all_reduce(total, group_of(""))
    added = (residual.float() + total.float()).to(x.dtype)
    right = normalized(added, Inputs(x, added, weight), EPS, None)
    actual = step(x.clone(), residual.clone(), weight)
    for one, other in zip(actual, (right.out, right.residual), strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        if one.dtype == x.dtype and not error <= ERROR:
            raise SystemExit(f"{name}: relative error {error.item():.1e}")


def microseconds(step: Step, inputs: tuple[torch.Tensor, ...], calls: int, replays: int) -> float:
    """Return the time of a call in us on this rank."""
    x, carried, weight = inputs

    def call() -> None:
        nonlocal carried
        _, carried = step(x, carried, weight)

    if not GPU:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - started) / calls * 1e6
    step(*inputs)
    return graph_us(call, calls, replays)


def times_of(tokens: int, hidden: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the times of the contenders on the slowest rank."""
    group = group_of("")
    device = torch.device("cuda", torch.cuda.current_device()) if GPU else "cpu"
    torch.manual_seed(tokens)
    like = {"device": device, "dtype": torch.bfloat16}
    residual, weight = torch.randn(tokens, hidden, **like), torch.randn(hidden, **like)
    torch.manual_seed(tokens + 1 + group.rank)
    x = torch.randn(tokens, hidden, **like)
    times = {}
    for name, step in contenders((tokens, hidden), options.quant).items():
        check(name, step, x, residual, weight)
        inputs = x.clone(), residual.clone(), weight
        times[name] = microseconds(step, inputs, options.calls, options.replays)
    return largest(times, group)


def row(tokens: int, hidden: int, times: dict[str, float]) -> str:
    """Return a row of the table."""
    is_ours = {name: name in (*OWN, "auto") for name in times}
    best, ours = (min(times[n] for n in times if is_ours[n] == own) for own in (False, True))
    cells = [f"{tokens}, {hidden}", *(f"{us:.2f}" for us in times.values()), f"{best / ours:.2f}"]
    return f"| {' | '.join(cells)} |"


def compile_all(options: argparse.Namespace) -> None:
    ranks = group_of("").world_size
    compile_ahead(
        AllReduceRmsNorm.program(
            NormProblem("", tokens, hidden, ranks, torch.bfloat16, EPS, False, options.quant), name
        )
        for tokens in options.tokens
        for hidden in options.hidden
        for name in OWN
    )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--quant", choices=["fp8_1x128"], help="quantization of the operator only")
    parser.add_argument("--calls", type=int, default=50 if GPU else 2, help="calls in a graph")
    parser.add_argument("--replays", type=int, default=20)
    options = parser.parse_args()
    if GPU:
        tw.init(heap_bytes=HEAP_BYTES)
        compile_all(options)
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    group = group_of("")
    for number, (hidden, tokens) in enumerate(product(options.hidden, options.tokens)):
        times = times_of(tokens, hidden, options)
        if group.rank == 0 and number == 0:
            print(f"{group.world_size} ranks, us")
            print(f"| tokens, hidden | {' | '.join(times)} | best other / ours |")
            print("|---" * (len(times) + 2) + "|")
        if group.rank == 0:
            print(row(tokens, hidden, times), flush=True)
    if GPU:
        tw.finalize()
    elif dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
