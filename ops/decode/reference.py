"""Decode attention in plain torch: for tests, CPUs, and sizes without programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernels.config import CONTIGUOUS, INTERLEAVED
from .problem import DecodeProblem, Inputs, Results


def reference(every: Sequence[Inputs], problem: DecodeProblem) -> Results:
    """Return what every rank receives, given the inputs of all ranks."""
    partials = [part_of(inputs, problem, rank) for rank, inputs in enumerate(every)]
    return merged(torch.stack(partials), problem)


def part_of(inputs: Inputs, problem: DecodeProblem, rank: int) -> torch.Tensor:
    """Return the part of a rank, (batch, heads, v_dim + 1) fp32: the result for its keys, and the
    logarithm of the sum of their exponentials. It reads no length on the host."""
    lengths = keys_on_rank(inputs.seq_lens, problem, rank)
    return torch.stack([_sequence(inputs, problem, b, lengths[b]) for b in range(problem.batch)])


def keys_on_rank(seq_lens: torch.Tensor, problem: DecodeProblem, rank: int) -> torch.Tensor:
    """Return how many tokens of each sequence a rank holds, at most its capacity."""
    size, capacity = problem.page_size, problem.table * problem.page_size
    keys = seq_lens
    if problem.sharding == CONTIGUOUS:
        keys = seq_lens - rank * capacity
    elif problem.sharding == INTERLEAVED:
        pages, last = seq_lens // size, seq_lens % size
        keys = (pages + problem.ranks - 1 - rank) // problem.ranks * size
        keys = keys + torch.where(pages % problem.ranks == rank, last, 0)
    return keys.clamp(0, capacity)


def _sequence(inputs: Inputs, problem: DecodeProblem, b: int, length: torch.Tensor) -> torch.Tensor:
    """Return the part of one sequence with ``length`` keys."""
    table, kv_heads = inputs.block_table[b].long().clamp(0, problem.pages - 1), problem.kv_heads
    is_key = torch.arange(problem.table * problem.page_size, device=table.device) < length

    def gathered(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        rows = cache[table].flatten(0, 1).float()
        rows = torch.where(is_key[:, None, None], rows, 0.0)
        return (rows if scale is None else rows * scale).transpose(0, 1)

    keys = gathered(inputs.k_cache, inputs.k_scale)
    if inputs.v_cache is None:
        values = keys[..., : problem.v_dim]
    else:
        values = gathered(inputs.v_cache, inputs.v_scale)
    q = inputs.q[b].float().view(kv_heads, -1, problem.dim)
    products = (q @ keys.transpose(1, 2)) * problem.scale
    products = products.masked_fill(~is_key, -torch.inf)
    lse = products.logsumexp(-1, keepdim=True)
    weights = torch.where(is_key, torch.exp(products - lse), 0.0)
    part = torch.cat([weights @ values, lse], -1)
    return part.view(problem.heads, -1)


def merged(partials: torch.Tensor, problem: DecodeProblem) -> Results:
    """Return the results, given the partials of all ranks, (ranks, batch, heads, v_dim + 1)."""
    out, lses = partials[..., :-1], partials[..., -1]
    lse = lses.logsumexp(0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse))
    out = (weights[..., None] * out).sum(0).to(problem.dtype)
    return Results(out, lse if problem.returns_lse else None)
