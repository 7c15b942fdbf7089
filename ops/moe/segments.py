"""Order in which a rank sends its tokens, and places of their results, for ``kernels.expert_mlp``.

A segment contains the tokens of one rank for one expert. Each rank computes these tables from the
routing of its own tokens; it does not need the routing of other ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .routing import first_choices


class Segments(NamedTuple):
    """Tokens of a rank sorted by segment, in int32. A token that names an expert several times has
    one row there.

    Attributes:
        sent: (T * k,) the token of each row. Segments are sorted by the number of the expert on its
            rank, then by that rank, beginning with this one. Undefined after the last row.
        counts: (W, E / W) rows of each segment.
        place: (T, k) row of each choice, as ``expert * capacity + row``; -1 for a choice that is
            dropped.
    """

    sent: torch.Tensor
    counts: torch.Tensor
    place: torch.Tensor


def segments_of(
    topk_ids: torch.Tensor, rank: int, ranks: int, num_experts: int, capacity: int
) -> Segments:
    """Return the tables for the tokens of ``rank``. No value reaches the host.

    Args:
        topk_ids: (T, k). Numbers that are no expert drop the choice.
        capacity: rows of a segment, at least T.
    """
    choices = topk_ids.shape[1]
    per_rank = num_experts // ranks
    is_expert = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = torch.where(is_expert, topk_ids, num_experts).long()
    first = first_choices(experts)
    is_first = first.eq(torch.arange(choices, device=first.device))
    step = (experts // per_rank - rank) % ranks
    segment = torch.where(is_expert, experts % per_rank * ranks + step, num_experts)
    keys = torch.where(is_first, segment, num_experts).flatten()
    order = keys.argsort(stable=True)
    numbers = torch.arange(num_experts + 1, device=keys.device)
    starts = torch.searchsorted(keys[order], numbers)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    row = row.view(topk_ids.shape).gather(-1, first) - starts[segment]
    place = torch.where(is_expert, experts * capacity + row, -1)
    by_step = starts.diff().view(per_rank, ranks)
    owners = torch.arange(ranks, device=keys.device)
    counts = by_step[:, (owners - rank) % ranks].t()
    return Segments((order // choices).int(), counts.int().contiguous(), place.int())
