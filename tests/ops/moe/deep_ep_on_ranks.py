"""Functions that test_deep_ep.py runs on each rank: exchanges by definition, as loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tileweave.builtins.errors import TileWeaveError
from tileweave.compat.deep_ep import Buffer

CHOICES, PER_RANK, HIDDEN = 3, 2, 256


class Tokens(NamedTuple):
    """Tokens of a rank, (T, H) bf16, their experts and weights, (T, k)."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def tokens_of(counts: list[int]) -> list[Tokens]:
    """Return the tokens of all ranks. Some choices are no expert; numbers are small integers, so
    that sums are exact."""
    generator = torch.Generator().manual_seed(sum(counts))
    num_experts, every = PER_RANK * len(counts), []
    for count in counts:
        x = torch.randint(-8, 9, (count, HIDDEN), generator=generator).bfloat16()
        scores = torch.rand(count, num_experts, generator=generator)
        ids = scores.topk(CHOICES).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
        weights = torch.randint(1, 9, ids.shape, generator=generator) / 8
        every.append(Tokens(x, ids, weights))
    return every


def layout_of(ids: Tensor, ranks: int) -> list[Tensor]:
    """Return the tokens of each rank, of each expert, and whether a rank has a token."""
    in_rank = torch.zeros(len(ids), ranks, dtype=torch.bool)
    for token, expert in ((t, e) for t, of_token in enumerate(ids.tolist()) for e in of_token):
        if expert >= 0:
            in_rank[token, expert // PER_RANK] = True
    per_expert = [int((ids == e).sum()) for e in range(ranks * PER_RANK)]
    return [in_rank.sum(0).int(), torch.tensor(per_expert).int(), in_rank]


def received_by(rank: int, every: list[Tokens]) -> tuple[Tokens, list[int]]:
    """Return the rows that a rank receives, and the choices of each of its experts."""
    first, rows = rank * PER_RANK, []
    for tokens in every:
        is_own = (tokens.ids >= first) & (tokens.ids < first + PER_RANK)
        kept = is_own.any(1)
        ids = torch.where(is_own, tokens.ids - first, -1)[kept]
        rows.append(Tokens(tokens.x[kept], ids, torch.where(is_own, tokens.weights, 0)[kept]))
    received = Tokens(*map(torch.cat, zip(*rows, strict=True)))
    return received, [int((received.ids == e).sum()) for e in range(PER_RANK)]


def dispatched(buffer: Buffer, x: Any, own: Tokens, **options: Any) -> tuple:
    """Return the results of ``dispatch`` after ``get_dispatch_layout``."""
    layout = buffer.get_dispatch_layout(own.ids, buffer.group_size * PER_RANK)
    names = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert"
    options |= dict(zip((*names, "is_token_in_rank"), layout, strict=False))
    return buffer.dispatch(x, **options)


def exchange(counts: list[int]) -> dict[str, bool]:
    """Compare the layout, ``dispatch`` and ``combine`` of bf16 with their definitions."""
    buffer, every = Buffer(dist.group.WORLD, 1 << 20), tokens_of(counts)
    own, ranks = every[buffer.rank], buffer.group_size
    expected, expected_counts = received_by(buffer.rank, every)
    layout = buffer.get_dispatch_layout(own.ids, ranks * PER_RANK)
    per_rank, rdma, per_expert, in_rank, event = layout
    right = {
        "layout": all(map(torch.equal, (per_rank, per_expert, in_rank), layout_of(own.ids, ranks))),
        "one node": rdma is None and event.event is None,
    }
    choices = {"topk_idx": own.ids, "topk_weights": own.weights}
    *rows, list_of_counts, handle, _ = dispatched(buffer, own.x, own, **choices)
    right["dispatch"] = all(map(torch.equal, rows, expected))
    right["counts"] = list_of_counts == expected_counts
    previous = {"previous_event": Buffer.capture(), "async_finish": True}
    out, weights, _ = buffer.combine(rows[0], handle, rows[2], **previous)
    sums = own.x * in_rank.sum(1, keepdim=True)
    right["combine"] = torch.equal(out, sums)
    right["weights"] = torch.equal(weights, torch.where(own.ids >= 0, own.weights, 0))
    bias = own.x / 2
    out, none, _ = buffer.combine(rows[0], handle, bias=(bias, bias))
    right["bias"] = none is None and torch.equal(out, sums + own.x)
    again = buffer.dispatch(2 * own.x, handle)
    right["handle"] = torch.equal(again[0], 2 * expected.x) and again[1:5] == (None,) * 4
    aligned = dispatched(buffer, own.x, own, expert_alignment=4)
    right["without choices"] = torch.equal(aligned[0], expected.x) and aligned[1:3] == (None, None)
    right["alignment"] = aligned[3] == [-(-n // 4) * 4 for n in expected_counts]
    return right


def quantized_exchange(counts: list[int]) -> dict[str, bool]:
    """Send e4m3 rows with scales of both layouts in memory."""
    buffer, every = Buffer(), tokens_of(counts)
    own, right = every[buffer.rank], {}
    expected, _ = received_by(buffer.rank, every)
    values = own.x.to(torch.float8_e4m3fn)
    scales = own.x.float().unflatten(1, (-1, 128)).amax(2)
    expected_scales = expected.x.float().unflatten(1, (-1, 128)).amax(2)
    for name, s in (("row-major", scales), ("column-major", scales.t().contiguous().t())):
        choices = {"topk_idx": own.ids, "topk_weights": own.weights}
        rows, ids, weights, _, handle, _ = dispatched(buffer, (values, s), own, **choices)
        again = buffer.dispatch((values, s), handle)[0]
        for what, (x, received_scales) in (("first", rows), ("again", again)):
            is_right = torch.equal(x.float(), expected.x.float())
            right[f"{name}, {what}"] = is_right and torch.equal(received_scales, expected_scales)
        right[name] = torch.equal(ids, expected.ids) and torch.equal(weights, expected.weights)
    return right


def worst(counts: list[int]) -> dict[str, bool]:
    """Exchange without the numbers of rows on the host."""
    buffer, every = Buffer(), tokens_of(counts)
    own, rows = every[buffer.rank], buffer.group_size * max(counts) + 1
    expected, _ = received_by(buffer.rank, every)
    choices = {"topk_idx": own.ids, "topk_weights": own.weights, "num_worst_tokens": rows}
    x, ids, weights, list_of_counts, handle, _ = dispatched(buffer, own.x, own, **choices)
    out, sums, _ = buffer.combine(x, handle, weights)
    received = len(expected.x)
    is_filled = bool((ids[received:] == -1).all() and (weights[received:] == 0).all())
    in_rank = layout_of(own.ids, buffer.group_size)[2]
    return {
        "shapes": len(x) == len(ids) == len(weights) == rows and list_of_counts == [],
        "rows": all(map(torch.equal, (t[:received] for t in (x, ids, weights)), expected)),
        "rest": is_filled,
        "combine": torch.equal(out, own.x * in_rank.sum(1, keepdim=True)),
        "weights": torch.equal(sums, torch.where(own.ids >= 0, own.weights, 0)),
    }


def low_latency(counts: list[int], use_fp8: bool, has_hook: bool) -> dict[str, bool]:
    """Compare low-latency calls with their definitions."""
    buffer, every = Buffer(low_latency_mode=True), tokens_of(counts)
    own, me, most = every[buffer.rank], buffer.rank, max(counts)
    num_experts = buffer.group_size * PER_RANK
    stats = torch.ones(PER_RANK, dtype=torch.int32)
    options = {"return_recv_hook": has_hook, "async_finish": not has_hook}
    rows, received, handle, event, hook = buffer.low_latency_dispatch(
        own.x, own.ids, most, num_experts, stats, use_fp8=use_fp8, **options
    )
    hook() if has_hook else event.current_stream_wait()
    x = rows
    if use_fp8:
        values, scales = rows
        x = (values.float() * scales.repeat_interleave(128, 2)).bfloat16()
    shape, right = (PER_RANK, buffer.group_size * most, HIDDEN), {}
    right["shape"] = tuple(x.shape) == shape and (hook is not None) == has_hook
    right["scales"] = not use_fp8 or scales.stride()[1] == 1
    for expert in range(PER_RANK):
        chosen = [t.x[(t.ids == me * PER_RANK + expert).any(1)] for t in every]
        expected = torch.cat(chosen)
        right[f"rows {expert}"] = close(x[expert, : len(expected)], expected, use_fp8)
        right[f"count {expert}"] = int(received[expert]) == len(expected) == int(stats[expert]) - 1
        x[expert, len(expected) :] = torch.nan  # which combine does not read
    factors = 1.0 + torch.arange(me * PER_RANK, (me + 1) * PER_RANK).view(-1, 1, 1)
    out = torch.empty_like(own.x)
    combined, event, hook = buffer.low_latency_combine(
        x * factors.bfloat16(), own.ids, own.weights, handle, out=out, **options
    )
    hook() if has_hook else event.current_stream_wait()
    weights = torch.where(own.ids >= 0, own.weights * (own.ids + 1), 0)
    right["combine"] = combined is out and close(out, own.x * weights.sum(1, keepdim=True), True)
    return right


def close(x: Tensor, expected: Tensor, is_rounded: bool) -> bool:
    return torch.allclose(x.float(), expected.float(), rtol=0.07 if is_rounded else 0, atol=1e-6)


def unequal_worst_tokens() -> str:
    """Return the error of ranks with other ``num_worst_tokens``."""
    buffer = Buffer()
    own = tokens_of([3] * buffer.group_size)[buffer.rank]
    try:
        dispatched(buffer, own.x, own, num_worst_tokens=20 + buffer.rank)
    except TileWeaveError as error:
        return str(error)
    return ""
