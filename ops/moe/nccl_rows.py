"""Exchange of rows by ``torch.distributed``. The host reads how many rows each rank sends."""

from __future__ import annotations

import torch

from ...runtime.host.group import Group
from ..core import nccl
from .routing import is_first_choice


def _sent(place: torch.Tensor, capacity: int, ranks: int) -> tuple[torch.Tensor, list[int]]:
    """Return the choices whose tokens are sent, in the order of their rows, and how many go to
    each rank."""
    choices = (is_first_choice(place) & (place >= 0)).flatten().nonzero().flatten()
    places = place.flatten()[choices]
    counts = torch.bincount(places // capacity, minlength=ranks)
    return choices[places.argsort()], counts.tolist()


def _received(source: torch.Tensor, per_rank: int, ranks: int) -> tuple[torch.Tensor, list[int]]:
    """Return the rows that are received, sorted by the rank that sends them, and how many each
    rank sends."""
    rows = (source >= 0).nonzero().flatten()
    owners = source[rows] // per_rank
    counts = torch.bincount(owners, minlength=ranks)
    return rows[owners.argsort(stable=True)], counts.tolist()


def dispatch_rows(
    x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, group: Group
) -> torch.Tensor:
    """Return the rows of this rank's experts; rows without a token are zero."""
    ranks, choices = group.world_size, place.shape[1]
    sent, sent_rows = _sent(place, source.shape[0], ranks)
    rows, received_rows = _received(source, place.numel(), ranks)
    received = x.new_empty(len(rows), x.shape[1])
    nccl.all_to_all_rows(x[sent // choices], sent_rows, received, received_rows, group)
    out = x.new_zeros(source.shape[0], x.shape[1])
    out[rows] = received
    return out


def combine_rows(
    y: torch.Tensor, weights: torch.Tensor, source: torch.Tensor, place: torch.Tensor, group: Group
) -> torch.Tensor:
    """Return the weighted sums of the rows of this rank's tokens, added in the order of the
    choices."""
    ranks, (tokens, choices) = group.world_size, place.shape
    sent, sent_rows = _received(source, place.numel(), ranks)
    rows, received_rows = _sent(place, source.shape[0], ranks)
    received = y.new_empty(len(rows), y.shape[1])
    nccl.all_to_all_rows(y[sent], sent_rows, received, received_rows, group)
    # Choices with the same expert have the same row.
    row_at = place.new_zeros(ranks * source.shape[0], dtype=torch.int64)
    row_at[place.flatten()[rows].long()] = torch.arange(len(rows), device=y.device)
    wide = weights.dtype
    total = y.new_zeros(tokens, y.shape[1], dtype=wide)
    for choice in range(choices):
        tokens_with_row = (place[:, choice] >= 0).nonzero().flatten()
        at = row_at[place[tokens_with_row, choice].long()]
        weight = weights[tokens_with_row, choice, None]
        total[tokens_with_row] += weight * received[at].to(wide)
    return total.to(y.dtype)
