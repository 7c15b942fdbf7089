"""Functions that test_bench.py runs on each rank, in its own process, on a CPU."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist

from tests.ops.on_ranks import numbers
from tileweave import ops
from tileweave.bench import command as bench
from tileweave.bench.attention import IMPLEMENTATIONS, Inputs, problem_of
from tileweave.bench.case import GATHER, RING, SDPA, Buffers
from tileweave.bench.results import Length
from tileweave.bench.sdpa import BACKENDS, by_rank, in_order, row_error
from tileweave.ops import shard_sequence
from tileweave.ops.core import nccl
from tileweave.ops.core.groups import group_of

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16


def whole(length: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """Return q, k and v of all ranks, equal on each."""
    return tuple(
        numbers(BATCH, length, heads, HEAD_DIM, of=ranks, what=name).float()
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention of whole sequences, by PyTorch, in double precision."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2)


def length_of(length: int, causal: bool, layout: str, ranks: int) -> Length:
    return Length(BATCH, length, HEADS, KV_HEADS, HEAD_DIM, causal, layout, ranks)


def errors(length: int, causal: bool, layout: str, group: Any = None) -> dict[str, float]:
    """Return the errors of PyTorch's implementations on this rank."""
    group = group or group_of("")
    ranks, rank = group.world_size, group.rank
    problem = problem_of(
        "sp_attention", length_of(length, causal, layout, ranks), ranks, torch.float32
    )
    q, k, v = whole(length, ranks)
    right = shard_sequence(expected(q, k, v, causal), rank, ranks, layout)
    q, k, v = (shard_sequence(x, rank, ranks, layout) for x in (q, k, v))
    held = [by_rank(x, group) for x in (k, v)]
    given = Inputs(q, k, v, *held, *(in_order(problem, x) for x in held), right)
    results = {}
    for name in BACKENDS["cpu"]:
        for kind in (SDPA, GATHER, RING):
            implementation = IMPLEMENTATIONS[f"{kind}{name}"](Buffers(problem, group, None))
            result = implementation.result(implementation.call(given))
            assert result.shape == q.shape and result.dtype == q.dtype
            results[f"{kind}{name}"] = row_error(result, right).item()
    return results


def right_results(length: int, causal: bool, layout: str) -> dict[str, float]:
    """Return the distance of the benchmark's reference from ``expected``."""
    group = group_of("")
    ranks = group.world_size
    problem = problem_of(
        "sp_attention", length_of(length, causal, layout, ranks), ranks, torch.float32
    )
    given = next(Inputs.random(problem, group))
    every = []
    for x in (given.q, given.k, given.v):
        shards = list(nccl.all_gather(x, group).unflatten(0, (ranks, BATCH)))
        every.append(ops.unshard_sequence(shards, layout))
    right = shard_sequence(expected(*every, causal), group.rank, ranks, layout)
    return {"result": row_error(given.result, right).item()}


def benchmark(json: str, figure: str | None, wrong: str = "") -> tuple[bool, str]:
    """Return whether ``tileweave bench`` finds attention right, and its output.

    Args:
        wrong: an implementation that has one wrong number in one row of the last rank.
    """
    said, makers = io.StringIO(), dict(IMPLEMENTATIONS)
    if wrong:
        IMPLEMENTATIONS[wrong] = lambda buffers: _off(makers[wrong](buffers))
    wanted = bench.BenchOptions(
        ["attention"], [f"{HEADS}x{KV_HEADS}x{HEAD_DIM}"], (96, 240), (1, 2), warmups=1, runs=2,
        json=json, figure=figure,
    )  # fmt: skip
    try:
        with contextlib.redirect_stdout(said):
            right = bench.run(wanted)
    finally:
        IMPLEMENTATIONS.update(makers)
    return right, said.getvalue()


def _off(implementation: Any) -> Any:
    call = implementation.call

    def changed(given: Inputs) -> torch.Tensor:
        out = call(given).clone()
        if dist.get_rank() == dist.get_world_size() - 1:
            row = out[-1, 7, 1]
            row[3] += row.norm() * 0.1
        return out

    return type(implementation)(changed, error=implementation.error)
