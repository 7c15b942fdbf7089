"""Routing of tokens to experts: tables that all ranks compute from the experts of all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core.library import define
from .call_sequence import NotRecordableError, Recorder, Shapes
from .kernels.routing import (
    MAX_EXPERTS,
    MAX_THREADS,
    MAX_TOKENS,
    RoutingConfig,
    routing_program,
)
from .local_kernels import compiled

NAME = "routing"
INDEX_LIMIT = 1 << 31
"""Numbers of rows, choices, vectors and keys are int32 in kernels."""


class Tables(NamedTuple):
    """Tables of an exchange for one rank, in int32. W ranks with T tokens of k choices each; C is
    the capacity.

    Attributes:
        source: (C,) token of each row of this rank's experts, as ``(rank * T + token) * k +
            choice``; -1 for rows past the last one.
        slots: (W * T, k) rows of each token of all ranks at this rank's experts, in descending
            order; -1 where there are fewer than k.
        place: (T, k) row of each choice of this rank's tokens, as ``rank * C + row``; -1 for a
            choice that is dropped.
    """

    source: torch.Tensor
    slots: torch.Tensor
    place: torch.Tensor


class Routing(NamedTuple):
    """Routing of all tokens, for one rank, in int32.

    Attributes:
        tables: tables of the exchange.
        offsets: (experts of this rank,) end of the rows of each expert.
        dropped: (W,) rows of each rank's experts that its capacity has no room for.
    """

    tables: Tables
    offsets: torch.Tensor
    dropped: torch.Tensor


RESULTS = *Tables._fields, "offsets", "dropped"
"""Names of the results of the kernels, in their order."""


def default_capacity(tokens: int, ranks: int, choices: int, experts_per_rank: int) -> int:
    """Return the rows that suffice for every routing: no token goes to an expert twice."""
    return tokens * ranks * min(choices, experts_per_rank)


def routing_of(topk_ids: torch.Tensor, rank: int, num_experts: int, capacity: int) -> Routing:
    """Return the routing for ``rank``.

    Rows are sorted by expert, then by rank and token. A token that names an expert several times
    has one row there. No value reaches the host. On a GPU, one kernel computes the routing if one
    block can place all choices; otherwise two kernels do.

    Args:
        topk_ids: (W, T, k), the experts of the tokens of all ranks. A number that is no expert
            drops the choice.
    """
    if has_kernel(topk_ids, num_experts):
        source, slots, place, offsets, dropped = _routing(topk_ids, rank, num_experts, capacity)
        return Routing(Tables(source, slots, place), offsets, dropped)
    return routing_by_torch(topk_ids, rank, num_experts, capacity)


def fits(topk_ids: torch.Tensor, num_experts: int) -> bool:
    """Return whether the kernels can compute the routing: blocks have threads for the choices of a
    token and memory for all experts, and numbers of choices are int32."""
    ranks, tokens, choices = topk_ids.shape
    return (
        0 < choices <= MAX_THREADS
        and 0 < ranks * tokens <= MAX_TOKENS
        and num_experts <= MAX_EXPERTS
        and topk_ids.numel() < INDEX_LIMIT
    )


def has_kernel(topk_ids: torch.Tensor, num_experts: int) -> bool:
    """Return whether kernels compute the routing; otherwise torch does."""
    return topk_ids.is_cuda and fits(topk_ids, num_experts)


def _eager(topk_ids, rank: int, num_experts: int, capacity: int) -> tuple[torch.Tensor, ...]:
    config = _config_of(topk_ids, num_experts, capacity)
    results = _fake(topk_ids, rank, num_experts, capacity)
    counts = topk_ids.new_empty(config.blocks * num_experts, dtype=torch.int16)
    with torch.cuda.device(topk_ids.device):
        launch = compiled(NAME, routing_program, config)
        launch(topk_ids.reshape(-1), rank, counts, *(table.view(-1) for table in results))
    return results


def _config_of(topk_ids: torch.Tensor, num_experts: int, capacity: int) -> RoutingConfig:
    dtype = str(topk_ids.dtype).removeprefix("torch.")
    return RoutingConfig(*topk_ids.shape, num_experts // topk_ids.shape[0], capacity, dtype)


def _fake(topk_ids, rank: int, num_experts: int, capacity: int) -> tuple[torch.Tensor, ...]:
    shapes = _shapes(topk_ids, num_experts, capacity).values()
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _shapes(topk_ids: torch.Tensor, num_experts: int, capacity: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the results by ``RESULTS``."""
    ranks, tokens, choices = topk_ids.shape
    shapes = (
        (capacity,), (ranks * tokens, choices), (tokens, choices), (num_experts // ranks,), (ranks,)
    )  # fmt: skip
    return dict(zip(RESULTS, shapes, strict=True))


def routing_memory(topk_ids: torch.Tensor, ranks: int, num_experts: int, capacity: int) -> Shapes:
    """Return the tensors of ``record_routing``: ``RESULTS``, then the others.

    Args:
        topk_ids: experts of the tokens of a rank.

    Raises:
        NotRecordableError: torch computes the routing.
    """
    topk_ids = topk_ids.expand(ranks, *topk_ids.shape)
    if not has_kernel(topk_ids, num_experts):
        raise NotRecordableError
    shapes = _shapes(topk_ids, num_experts, capacity)
    blocks = _config_of(topk_ids, num_experts, capacity).blocks
    return {
        **{name: (shape, torch.int32) for name, shape in shapes.items()},
        "all_ids": (tuple(topk_ids.shape), topk_ids.dtype),
        "counts": ((blocks * num_experts,), torch.int16),
    }


def record_routing(recorder: Recorder, rank: int, num_experts: int, capacity: int) -> None:
    """Append the kernel that computes the routing of ``all_ids``."""
    all_ids = recorder["all_ids"]
    with torch.cuda.device(all_ids.device):
        config = _config_of(all_ids, num_experts, capacity)
        launch = compiled(NAME, routing_program, config)
    all_ids_, *others = (
        (name, recorder[name].view(-1)) for name in ("all_ids", "counts", *RESULTS)
    )
    recorder.kernel(launch, all_ids_, rank, *others)


_routing = define(
    f"{NAME}(Tensor topk_ids, int rank, int num_experts, SymInt capacity) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _eager, _fake,
)  # fmt: skip


def routing_by_torch(topk_ids: torch.Tensor, rank: int, num_experts: int, capacity: int) -> Routing:
    """Compute the routing as ``routing_of`` does, with torch operations."""
    ranks, tokens, choices = topk_ids.shape
    per_rank = num_experts // ranks
    is_expert = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = torch.where(is_expert, topk_ids, num_experts).long()
    first = first_choices(experts)
    is_first = first.eq(_numbers(choices, first))
    keys = torch.where(is_first, experts, num_experts).flatten()
    order = keys.argsort(stable=True)
    ends = torch.searchsorted(keys[order], _numbers(num_experts, keys), right=True)
    starts = torch.cat([ends.new_zeros(1), ends[per_rank - 1 :: per_rank]])
    counts = starts.diff()
    positions = torch.empty_like(order).scatter_(0, order, _numbers(len(order), order))
    owner = experts // per_rank  # W for what is no expert
    row = positions.view(topk_ids.shape).gather(-1, first) - starts[owner]
    is_kept = is_expert & (row < capacity)
    place = torch.where(is_kept[rank], owner[rank] * capacity + row[rank], -1)
    slots = torch.where(is_kept & is_first & (owner == rank), row, -1).int()
    slots = slots.sort(-1, descending=True).values.view(ranks * tokens, choices)
    rows = _numbers(capacity, order)
    position = (starts[rank] + rows).clamp(max=len(order) - 1)
    source = torch.where(rows < counts[rank], order[position], -1)
    offsets = ends[rank * per_rank : (rank + 1) * per_rank] - starts[rank]
    return Routing(
        Tables(source.int(), slots, place.int()),
        offsets.clamp(max=capacity).int(),
        (counts - capacity).clamp(min=0).int(),
    )


def masked_tables(
    topk_ids: torch.Tensor, rank: int, num_experts: int
) -> tuple[Tables, torch.Tensor]:
    """Return tables for rows in the masked layout, and the rows of each expert of ``rank``, int32.

    Each expert has room for the tokens of all ranks, W * T rows. Its rows are the first of them, in
    the order of ``routing_of``.

    Args:
        topk_ids: (W, T, k), as for ``routing_of``.
    """
    ranks, tokens, _ = topk_ids.shape
    per_rank, height = num_experts // ranks, ranks * tokens
    dense = routing_of(topk_ids, rank, num_experts, per_rank * height).tables
    kept = torch.where(is_first_choice(topk_ids), topk_ids, -1)
    counts = counts_of(kept, num_experts).view(ranks, per_rank)
    ends = counts.cumsum(1, dtype=torch.int32)
    shifts = _numbers(per_rank, ends).int() * height - ends + counts
    shift_of_choices = shifts.flatten()[topk_ids[rank].clamp(0, num_experts - 1).long()]

    def to_masked(rows: torch.Tensor) -> torch.Tensor:
        experts = torch.searchsorted(ends[rank], rows, right=True).clamp(max=per_rank - 1)
        return torch.where(rows >= 0, rows + shifts[rank][experts], -1)

    rows = torch.where(dense.source >= 0, _numbers(len(dense.source), ends).int(), -1)
    source = rows.new_full((len(rows) + 1,), -1)
    source[to_masked(rows).long()] = dense.source  # the last element is for rows without a token
    place = torch.where(dense.place >= 0, dense.place + shift_of_choices, -1)
    return Tables(source[:-1], to_masked(dense.slots), place), counts[rank]


def counts_of(ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return how often each number below ``count`` occurs, (count,) int32; others are not counted.
    The host does not wait."""
    ids = torch.where((ids >= 0) & (ids < count), ids, count).flatten().long()
    counts = torch.zeros(count + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[:count]


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
