"""Tables of a routing, against loops over experts and tokens."""

from __future__ import annotations

import pytest
import torch

from tests.ops.moe.by_definition import all_rows, kept_ids, random_ids
from tileweave.ops.moe.routing import Routing, Tables, default_capacity, routing_of


def expected(ids: torch.Tensor, rank: int, num_experts: int, capacity: int) -> Routing:
    ranks, tokens, choices = ids.shape
    rows, kept = all_rows(ids, num_experts), kept_ids(ids, num_experts, capacity)
    source = torch.full((capacity,), -1)
    for n, row in enumerate(rows[rank][:capacity]):
        source[n] = (row.rank * tokens + row.token) * choices + row.choice
    place = torch.full((tokens, choices), -1)
    for token, choice in torch.cartesian_prod(torch.arange(tokens), torch.arange(choices)).tolist():
        expert = int(kept[rank, token, choice])
        if expert >= 0:
            owner = expert * ranks // num_experts
            places = [(row.expert, row.rank, row.token) for row in rows[owner]]
            place[token, choice] = owner * capacity + places.index((expert, rank, token))
    per_rank = num_experts // ranks
    first = rank * per_rank
    ends = [sum(row.expert <= first + e for row in rows[rank]) for e in range(per_rank)]
    dropped = [max(0, len(of_rank) - capacity) for of_rank in rows]
    offsets = [min(end, capacity) for end in ends]
    slots = torch.full((ranks * tokens, choices), -1)
    of_tokens: dict[int, list[int]] = {}
    for n, row in enumerate(rows[rank][:capacity]):
        of_tokens.setdefault(row.rank * tokens + row.token, []).insert(0, n)
    for token, numbers in of_tokens.items():
        slots[token, : len(numbers)] = torch.tensor(numbers)
    tables = Tables(source, slots, place)
    return Routing(tables, torch.tensor(offsets), torch.tensor(dropped))


def flat(routing: Routing) -> tuple[torch.Tensor, ...]:
    return *routing.tables, routing.offsets, routing.dropped


@pytest.mark.parametrize("seed", range(60))
def test_tables(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks, per_rank, tokens, choices = torch.randint(1, 6, (4,), generator=generator).tolist()
    num_experts = ranks * per_rank
    ids = random_ids(ranks, tokens, choices, num_experts, generator)
    capacity = default_capacity(tokens, ranks, choices, per_rank)
    if seed % 2:
        capacity = max(1, capacity // 3)
    for rank in range(ranks):
        actual = routing_of(
            ids.to([torch.int32, torch.int64][seed % 2]), rank, num_experts, capacity
        )
        right = expected(ids, rank, num_experts, capacity)
        pairs = zip(flat(actual), flat(right), strict=True)
        for table, definition in pairs:
            assert table.dtype == torch.int32 and table.tolist() == definition.tolist()


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_the_default_capacity_is_enough_and_needed(choices):
    """If all tokens choose different experts of one rank, or one expert several times."""
    ranks, tokens, per_rank = 2, 4, 3
    capacity = default_capacity(tokens, ranks, choices, per_rank)
    ids = (torch.arange(choices) % per_rank).expand(ranks, tokens, choices)
    assert routing_of(ids, 0, ranks * per_rank, capacity).dropped.tolist() == [0, 0]
    assert routing_of(ids, 1, ranks * per_rank, capacity - 1).dropped.tolist() == [1, 0]


def test_ids_that_wrap_around_are_no_experts():
    ids = torch.tensor([[[1 << 32, -(1 << 40), 0]]])
    assert routing_of(ids, 0, 4, 3).tables.place.tolist() == [[-1, -1, 0]]
