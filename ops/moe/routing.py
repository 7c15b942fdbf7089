"""Routing of tokens to experts: tables that all ranks compute from the experts of all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Tables of one rank, in int32. W ranks with T tokens of k choices each; C is the capacity.

    Attributes:
        source: (C,) token of each row of this rank's experts, as ``(rank * T + token) * k +
            choice``; -1 for rows past the last one.
        place: (T, k) row of each choice of this rank's tokens, as ``rank * C + row``; -1 for a
            choice that is dropped.
        offsets: (experts of this rank,) end of the rows of each expert.
        dropped: (W,) rows of each rank's experts that its capacity has no room for.
    """

    source: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor
    dropped: torch.Tensor


def default_capacity(tokens: int, ranks: int, choices: int, experts_per_rank: int) -> int:
    """Return the rows that suffice for every routing: no token goes to an expert twice."""
    return tokens * ranks * min(choices, experts_per_rank)


def routing_of(topk_ids: torch.Tensor, rank: int, num_experts: int, capacity: int) -> Routing:
    """Return the tables of ``rank``.

    Rows are sorted by expert, then by rank and token. A token that names an expert several times
    has one row there. No value reaches the host.

    Args:
        topk_ids: (W, T, k), of all ranks. Numbers that are no expert drop the choice.
    """
    ranks, tokens, choices = topk_ids.shape
    per_rank, per_source = num_experts // ranks, tokens * choices
    is_expert = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = torch.where(is_expert, topk_ids, num_experts).long()
    first = first_choices(experts)
    keys = torch.where(is_first_choice(experts), experts, num_experts).flatten()
    order = keys.argsort(stable=True)
    ends = torch.searchsorted(keys[order], _numbers(num_experts, keys), right=True)
    starts = torch.cat([ends.new_zeros(1), ends[per_rank - 1 :: per_rank]])
    counts = starts.diff()
    positions = torch.empty_like(order).scatter_(0, order, _numbers(len(order), order))
    own = experts[rank]
    owner = own.clamp(max=num_experts - 1) // per_rank
    row = positions.view(topk_ids.shape)[rank].gather(-1, first[rank]) - starts[owner]
    place = torch.where((own < num_experts) & (row < capacity), owner * capacity + row, -1)
    slots = _numbers(capacity, order)
    at = (starts[rank] + slots).clamp(max=ranks * per_source - 1)
    source = torch.where(slots < counts[rank], order[at], -1)
    offsets = ends[rank * per_rank : (rank + 1) * per_rank] - starts[rank]
    tables = source, place, offsets.clamp(max=capacity), (counts - capacity).clamp(min=0)
    return Routing(*(table.int() for table in tables))


def first_choices(ids: torch.Tensor) -> torch.Tensor:
    """Return, for each choice of a token, the first choice with the same number.

    Args:
        ids: (..., k).
    """
    return ids.unsqueeze(-1).eq(ids.unsqueeze(-2)).int().argmax(-1)


def is_first_choice(ids: torch.Tensor) -> torch.Tensor:
    """Return, for each choice of a token, whether no choice before it has the same number."""
    return first_choices(ids).eq(_numbers(ids.shape[-1], ids))


def _numbers(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)
