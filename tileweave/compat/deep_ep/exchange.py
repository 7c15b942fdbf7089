"""Exchanges of ``Buffer``, in the current stream.

DeepEP's ``dispatch`` sends a token once to each rank that has some of its experts. This is
``ops.dispatch`` for a mixture where each rank is an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...ops.core.groups import group_of
from ...ops.moe.dispatch import NO_EXPERT, DispatchHandle
from ...ops.moe.quant import quantized
from ...ops.moe.routing import counts_of, masked_tables
from ...ops.moe.row_exchange import gather_from_all
from ...ops.moe.row_problem import padded

_WORD = torch.int32
"""Type of the numbers that are sent together with tokens."""
_TRANSPORT = "auto"


class Handle(NamedTuple):
    """Routing of a dispatch where ranks are the experts.

    Attributes:
        routing: handle of ``ops.dispatch``.
        rows: number of rows that the rank has received, or ``num_worst_tokens``.
    """

    routing: DispatchHandle
    rows: int


class Layout(NamedTuple):
    """Destinations of a rank's T tokens. W ranks have E experts.

    Attributes:
        num_tokens_per_rank: (W,) int32.
        num_tokens_per_expert: (E,) int32.
        is_token_in_rank: (T, W) bool.
    """

    num_tokens_per_rank: Tensor
    num_tokens_per_expert: Tensor
    is_token_in_rank: Tensor


def layout_of(topk_idx: Tensor, num_experts: int, ranks: int) -> Layout:
    """Return the destinations of tokens with the experts ``topk_idx``, (T, k)."""
    owners = topk_idx // (num_experts // ranks)
    is_in_rank = owners.unsqueeze(-1).eq(torch.arange(ranks, device=owners.device)).any(1)
    return Layout(is_in_rank.sum(0, dtype=_WORD), counts_of(topk_idx, num_experts), is_in_rank)


def send(
    parts: tuple[Tensor, ...], layout: Layout, choices: tuple[Tensor, ...], num_worst_tokens: int,
    group: str,
) -> tuple[list[Tensor], list[Tensor], list[int], Handle]:  # fmt: skip
    """Return the received rows of ``parts`` and of ``choices``, the number of choices of each
    expert of this rank, and a handle.

    Args:
        parts: x, (T, H), and its scales if it has any.
        choices: ``topk_idx`` and ``topk_weights``, or empty.
        num_worst_tokens: 0, or the number of rows; then the host waits for nothing, and the numbers
            of choices are empty.
    """
    ranks, (x, *scales) = group_of(group), parts
    world_size, counts = ranks.world_size, []
    rows, most = num_worst_tokens, num_worst_tokens // world_size
    if not num_worst_tokens:
        rows, most, counts = _sizes(layout, len(x), group)
    in_rank = layout.is_token_in_rank
    numbers = torch.arange(world_size, dtype=_WORD, device=x.device)
    received, _, routing = ops.dispatch(
        x, torch.where(in_rank, numbers, NO_EXPERT), in_rank.float(),
        num_experts=world_size, capacity=num_worst_tokens or None, max_tokens=most,
        clear_rest=False, group=group, transport=_TRANSPORT,
    )  # fmt: skip
    handle = Handle(routing, rows)
    sent = [*scales, *(choices and (choices[0].to(_WORD), choices[1].float()))]
    if not sent:
        return [received[:rows]], [], counts, handle
    words = _exchanged(torch.cat([t.view(_WORD) for t in sent], 1), routing)[:rows]
    split = words.split([t.shape[1] for t in sent], 1)
    others = [t.contiguous().view(s.dtype) for t, s in zip(split, sent, strict=True)]
    received = [received[:rows], *others[: len(scales)]]
    if not choices:
        return received, [], counts, handle
    ids, weights = others[-2:]
    per_rank = len(layout.num_tokens_per_expert) // world_size
    ids = ids - ranks.rank * per_rank
    is_row = routing.tables.source[:rows, None] >= 0
    is_own = is_row & (ids >= 0) & (ids < per_rank)
    ids = torch.where(is_own, ids, -1).to(choices[0].dtype)
    return received, [ids, torch.where(is_own, weights, 0)], counts, handle


def _sizes(layout: Layout, tokens: int, group: str) -> tuple[int, int, list[int]]:
    """Return the number of rows of this rank, the maximum number of tokens of a rank, rounded up to
    a power of two, and the number of choices of each of its experts. The host waits for them."""
    ranks = group_of(group)
    own = *layout[:2], layout.num_tokens_per_rank.new_full((1,), tokens)
    every = ops.all_gather(torch.cat(own), group).view(ranks.world_size, -1).cpu()
    to_ranks, to_experts, all_tokens = every.split([len(t) for t in own], 1)
    counts = to_experts.sum(0).view(ranks.world_size, -1)[ranks.rank]
    most = max(1, int(all_tokens.max()))
    return int(to_ranks[:, ranks.rank].sum()), 1 << (most - 1).bit_length(), counts.tolist()


def send_again(parts: tuple[Tensor, ...], handle: Handle) -> list[Tensor]:
    """Return the rows that this rank receives of ``parts`` on the way of an earlier ``send``."""
    return [_exchanged(part, handle.routing)[: handle.rows] for part in parts]


def _exchanged(tokens: Tensor, routing: DispatchHandle) -> Tensor:
    """Return the rows of tokens, and undefined ones past the last."""
    tables, group, transport = routing.tables, routing.group, routing.transport
    tokens = padded(tokens.contiguous(), len(tables.place))
    return torch.ops.tileweave.dispatch_rows(tokens, *tables, False, True, group, transport)


def add(
    x: Tensor, topk_weights: Tensor | None, biases: tuple[Tensor, ...], handle: Handle
) -> tuple[Tensor, Tensor | None]:
    """Return the sums of the rows and of the weights of each token."""
    routing, capacity = handle.routing, len(handle.routing.tables.source)
    out = ops.combine(padded(x, capacity), routing)
    if biases:
        out = sum((bias.float() for bias in biases), out.float()).to(out.dtype)
    if topk_weights is not None:
        topk_weights = ops.combine(padded(topk_weights, capacity), routing)
    return out, topk_weights


def send_to_experts(
    x: Tensor, topk_idx: Tensor, most: int, num_experts: int, use_fp8: bool,
    stats: Tensor | None, group: str,
) -> tuple[list[Tensor], Tensor, DispatchHandle]:  # fmt: skip
    """Return the rows of the experts, (E / W, W * most, H), with their scales if there are any, the
    tokens of each expert, and a handle whose weights are undefined.

    Args:
        most: maximum number of tokens of a rank.
        stats: the tokens of each expert are added to it, if given.
    """
    ranks = group_of(group)
    ids = padded(topk_idx, most, NO_EXPERT)
    ids = gather_from_all(ids, group, _TRANSPORT).view(ranks.world_size, *ids.shape)
    tables, counts = masked_tables(ids, ranks.rank, num_experts)
    if stats is not None:
        stats += counts
    weights = topk_idx.new_empty(topk_idx.shape, dtype=torch.float32)
    routing = DispatchHandle(
        weights, tables, counts.new_zeros(ranks.world_size), group, _TRANSPORT, True
    )
    parts = quantized(x) if use_fp8 else (x,)
    rows = [_exchanged(part, routing).unflatten(0, (len(counts), -1)) for part in parts]
    if use_fp8:
        rows[1] = rows[1].mT.contiguous().mT
    return rows, counts, routing


def add_of_experts(
    x: Tensor, topk_weights: Tensor, handle: DispatchHandle, out: Tensor | None
) -> Tensor:
    """Return the weighted sums of the rows of experts, (E / W, rows, H)."""
    return ops.combine(x.flatten(0, 1), handle._replace(weights=topk_weights), out=out)
