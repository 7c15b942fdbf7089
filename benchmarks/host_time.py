"""Measure the host time of an eager call of each operator, beside torch.distributed.

    torchrun --nproc-per-node=2 benchmarks/host_time.py [--calls 200] [--burst 20] [--only combine]

Problems are small, so the host is slower than the GPU. The calls come in bursts, and each burst
finds an empty queue of the GPU, which has room for all its launches. Times are in us, of the
slowest rank:

- ``call``: median of the host times of single calls
- ``burst``: time of a burst, divided by its calls: median of the bursts
- ``bar``: the largest ``call`` that is accepted
- ``torch``: the same work by ``torch.distributed`` and torch. The tables of a routing are made
  before, so that the host waits for no number of rows; ours makes them in each call.

Without GPUs the ranks run with gloo, which only tests this file.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

import tileweave as tw
from tileweave import ops
from tileweave.bench.sdpa import backend_of
from tileweave.ops.core.groups import group_of
from tileweave.runtime.host.measure import largest

GPU = torch.cuda.is_available()
ROWS, N, K = 128, 256, 256
"""Rows of a rank, N and K of GEMMs. Collectives and the norm have matrices of ROWS x K."""
EXPERTS_PER_RANK, TOP_K, WIDTH = 2, 2, 256
"""Experts of a rank, choices of a token, and intermediate size of an expert."""
BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 4, 8, 2, 128, 64, 4
"""Extents of a decode step; each sequence has PAGES pages on each rank."""
HEAP_BYTES = 1 << 30
FAST_BAR, DISPATCH_BAR, COMBINE_BAR, MLP_BAR, DECODE_BAR = 15, 35, 15, 90, 20
"""Largest accepted host times in us. The first is that of GEMMs, collectives and the norm."""
# Older releases of torch have no other names of these collectives.
warnings.filterwarnings("ignore", ".*(_into|_scatter)_tensor` is deprecated", FutureWarning)
Call = Callable[[], Any]


class Case(NamedTuple):
    """Call of an operator, the same work without TileWeave, and the largest accepted time."""

    name: str
    ours: Call
    torch: Call
    bar: float | None


class Inputs:
    """Tensors of zeros in the memory of this rank."""

    def __init__(self) -> None:
        group = group_of("")
        self.ranks, self.device = group.world_size, group.device

    def zeros(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def gemms(inputs: Inputs) -> Iterator[Case]:
    """Yield the GEMMs that gather their rows or add their products over ranks."""
    shard, b = inputs.zeros(ROWS, K), inputs.zeros(K, N)
    a = inputs.zeros(inputs.ranks * ROWS, K)

    def gathered() -> torch.Tensor:
        rows = torch.empty_like(a)
        dist.all_gather_into_tensor(rows, shard)
        return rows @ b

    def scattered() -> torch.Tensor:
        out = a.new_empty(ROWS, N)
        dist.reduce_scatter_tensor(out, a @ b)
        return out

    yield Case("all_gather_matmul", lambda: ops.all_gather_matmul(shard, b), gathered, FAST_BAR)
    yield Case(
        "matmul_reduce_scatter", lambda: ops.matmul_reduce_scatter(a, b), scattered, FAST_BAR
    )
    yield Case(
        "matmul_all_reduce", lambda: ops.matmul_all_reduce(a, b), lambda: dist.all_reduce(a @ b),
        FAST_BAR,
    )  # fmt: skip


def collectives(inputs: Inputs) -> Iterator[Case]:
    """Yield the collectives, and the all-reduce with a norm. torch adds zeros in place."""
    shard, whole = inputs.zeros(ROWS, K), inputs.zeros(inputs.ranks * ROWS, K)
    residual, weight = inputs.zeros(ROWS, K), inputs.zeros(K)

    def gathered() -> None:
        dist.all_gather_into_tensor(torch.empty_like(whole), shard)

    def scattered() -> None:
        dist.reduce_scatter_tensor(torch.empty_like(shard), whole)

    def exchanged() -> None:
        dist.all_to_all_single(torch.empty_like(whole), whole)

    def normalized() -> torch.Tensor:
        dist.all_reduce(shard)
        return functional.rms_norm(shard + residual, (K,), weight)

    norm = partial(ops.all_reduce_rms_norm, shard, residual, weight)
    yield Case("all_gather", lambda: ops.all_gather(shard), gathered, FAST_BAR)
    yield Case("reduce_scatter", lambda: ops.reduce_scatter(whole), scattered, FAST_BAR)
    yield Case(
        "all_reduce", lambda: ops.all_reduce(shard), lambda: dist.all_reduce(shard), FAST_BAR
    )
    yield Case("all_to_all", lambda: ops.all_to_all(whole), exchanged, FAST_BAR)
    yield Case("all_reduce_rms_norm", norm, normalized, FAST_BAR)


def mixtures(inputs: Inputs) -> Iterator[Case]:
    """Yield the operators for mixtures. The choices of the tokens are spread over all experts."""
    experts = EXPERTS_PER_RANK * inputs.ranks
    choices = torch.arange(ROWS * TOP_K, dtype=torch.int32, device=inputs.device)
    ids = (choices % experts).view(ROWS, TOP_K)
    scores = inputs.zeros(ROWS, TOP_K, dtype=torch.float32)
    x = inputs.zeros(ROWS, K)
    w_gate_up = inputs.zeros(EXPERTS_PER_RANK, 2 * WIDTH, K)
    w_down = inputs.zeros(EXPERTS_PER_RANK, K, WIDTH)
    send = partial(ops.dispatch, x, ids, scores, num_experts=experts)
    rows, _, handle = first_result(send)

    sent = ids.flatten().argsort(stable=True)
    loads = torch.bincount(ids.flatten(), minlength=experts)
    sent_rows = loads.view(inputs.ranks, -1).sum(1).tolist()
    own = loads.view(inputs.ranks, -1)[group_of("").rank]
    received_rows = [int(own.sum())] * inputs.ranks  # all ranks have the same choices
    from_each = torch.arange(EXPERTS_PER_RANK, device=inputs.device).repeat_interleave(own)
    order = from_each.repeat(inputs.ranks).argsort(stable=True)
    tokens, back, chosen = sent // TOP_K, order.argsort(), sent.argsort()
    offsets = (own * inputs.ranks).cumsum(0).int()
    weights = scores.bfloat16()[:, None]

    def dispatched() -> torch.Tensor:
        received = x.new_empty(len(order), K)
        dist.all_to_all_single(received, x[tokens], received_rows, sent_rows)
        return received[order]

    def combined(y: torch.Tensor) -> torch.Tensor:
        returned = y.new_empty(len(tokens), K)
        dist.all_to_all_single(returned, y[back], sent_rows, received_rows)
        return torch.bmm(weights, returned[chosen].view(ROWS, TOP_K, K))[:, 0]

    def mlp() -> torch.Tensor:
        products = functional.grouped_mm(dispatched(), w_gate_up.transpose(1, 2), offs=offsets)
        gate, up = products.chunk(2, -1)
        hidden = functional.silu(gate) * up
        return combined(functional.grouped_mm(hidden, w_down.transpose(1, 2), offs=offsets))

    y = rows[: len(order)]
    yield Case("dispatch", send, dispatched, DISPATCH_BAR)
    yield Case("combine", lambda: ops.combine(rows, handle), lambda: combined(y), COMBINE_BAR)
    layer = partial(ops.expert_mlp, x, ids, scores, w_gate_up, w_down)
    yield Case("expert_mlp", layer, mlp, MLP_BAR)


def attentions(inputs: Inputs) -> Iterator[Case]:
    """Yield attention to the tokens of all ranks: of a decode step, and of a sharded sequence."""
    zeros, attend = inputs.zeros, backend_of("flash", inputs.device)
    k_cache, v_cache = zeros(2, BATCH * PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    table = torch.arange(BATCH * PAGES, dtype=torch.int32, device=inputs.device).view(BATCH, -1)
    lengths = torch.full_like(table[:, 0], inputs.ranks * PAGES * PAGE_SIZE)
    step = zeros(BATCH, HEADS, HEAD_DIM)
    keys, values = (cache.view(BATCH, -1, KV_HEADS, HEAD_DIM) for cache in (k_cache, v_cache))
    q, k = zeros(1, ROWS, HEADS, HEAD_DIM), zeros(1, ROWS, KV_HEADS, HEAD_DIM)

    def decoded() -> torch.Tensor:
        out, lse = attend(step[:, None], keys, values, False)
        part = torch.cat([out.float(), lse[..., None]], -1)[:, :, 0]
        parts = part.new_empty(inputs.ranks, *part.shape)
        dist.all_gather_into_tensor(parts, part[None])
        return (parts[..., :-1] * parts[..., -1:].softmax(0)).sum(0).to(step.dtype)

    def attended() -> torch.Tensor:
        rows = k.new_empty(2, inputs.ranks * ROWS, KV_HEADS, HEAD_DIM)
        for part in rows:
            dist.all_gather_into_tensor(part, k[0])
        return attend(q, rows[:1], rows[1:], False).out.transpose(1, 2)

    yield Case(
        "decode_attention",
        lambda: ops.decode_attention(step, k_cache, v_cache, block_table=table, seq_lens=lengths),
        decoded,
        DECODE_BAR,
    )
    yield Case("sp_attention", lambda: ops.sp_attention(q, k, k, causal=False), attended, None)


FAMILIES = gemms, collectives, mixtures, attentions


def first_result(call: Call) -> Any:
    """Return the result of a call, after all its kernels are compiled, those for other sizes, too:
    compilers in the background would slow the host down."""
    tw.prepare(call).wait()
    return call()


def synchronize() -> None:
    """Wait for the GPUs of all ranks."""
    if GPU:
        torch.cuda.synchronize()
    dist.barrier()
    if GPU:
        torch.cuda.synchronize()


def single_us(call: Call, calls: int) -> list[float]:
    """Return the host times of calls in us."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def burst_us(call: Call, calls: int) -> float:
    """Return the time of calls back to back in us, divided by their number."""
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / 1e3 / calls


def host_us(call: Call, options: argparse.Namespace) -> tuple[float, float]:
    """Return the medians of single calls and of bursts in us, on the slowest rank."""
    single: list[float] = []
    bursts: list[float] = []
    for _ in range(-(-options.calls // options.burst) + 1):
        synchronize()
        single += single_us(call, options.burst)
        synchronize()
        bursts.append(burst_us(call, options.burst))
    own = {
        "call": statistics.median(single[options.burst :]),  # the first burst warms up
        "burst": statistics.median(bursts[1:]),
    }
    slowest = largest(own, group_of(""))
    return slowest["call"], slowest["burst"]


def row(case: Case, options: argparse.Namespace) -> str:
    """Return a row of the table."""
    first_result(case.ours)
    ours, theirs = host_us(case.ours, options), host_us(case.torch, options)
    bar = "" if case.bar is None else f"{case.bar:.0f}"
    verdict = "" if case.bar is None or not GPU else "yes" if ours[0] <= case.bar else "no"
    times = " | ".join(f"{us:.1f}" for us in (*ours, *theirs))
    return f"| {case.name} | {times} | {bar} | {verdict} |"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=200 if GPU else 4, help="calls of a time")
    parser.add_argument("--burst", type=int, default=20 if GPU else 2, help="calls of a burst")
    parser.add_argument("--only", default="", help="operators whose names contain this")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("started without torchrun; expected torchrun --nproc-per-node=2")
    if GPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        tw.init(heap_bytes=HEAP_BYTES)
    else:
        dist.init_process_group("gloo")
    rows = [
        row(case, options)
        for family in FAMILIES
        for case in family(Inputs())
        if options.only in case.name
    ]
    if dist.get_rank() == 0:
        machine = torch.cuda.get_device_name() if GPU else "CPU"
        print(f"host time on {dist.get_world_size()} x {machine}, us")
        print("| operator | call | burst | torch: call | torch: burst | bar | within |")
        print("|---" * 7 + "|", *rows, sep="\n")
    if GPU:
        tw.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
