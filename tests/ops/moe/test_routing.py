"""Tables of a routing, against loops over experts and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.moe.by_definition import all_rows, kept_ids, random_ids
from tests.ops.moe.simulated_kernels import simulate_kernels
from tileweave.ops.moe import local_kernels
from tileweave.ops.moe.kernels.routing import MOST_CHOICES, RoutingConfig, routing_program
from tileweave.ops.moe.routing import (
    Routing,
    Tables,
    default_capacity,
    fits,
    has_kernel,
    routing_by_torch,
    routing_of,
)


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


def by_kernel(ids: torch.Tensor, rank: int, num_experts: int, capacity: int, level: str) -> Routing:
    """Return the routing that the simulator computes; the tables are filled with another value."""
    ranks, tokens, choices = ids.shape
    dtype = str(ids.dtype).removeprefix("torch.")
    config = RoutingConfig(*ids.shape, num_experts // ranks, capacity, dtype)
    lengths = {
        "source": capacity, "slots": ids.numel(), "place": tokens * choices,
        "offsets": num_experts // ranks, "dropped": ranks,
    }  # fmt: skip
    inputs = {name: np.full(length, -7, np.int32) for name, length in lengths.items()}
    inputs |= {"ids": ids.numpy().reshape(-1), "this_rank": rank}
    (outputs,) = tw.simulate(routing_program(config), 1, [inputs], level=level, epochs=1)
    source, slots, place, offsets, dropped = (torch.from_numpy(outputs[n]) for n in lengths)
    tables = Tables(source, slots.view(-1, choices), place.view(tokens, choices))
    return Routing(tables, offsets, dropped)


def check_kernel(seed: int, level: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks, per_rank, tokens, choices = torch.randint(1, 6, (4,), generator=generator).tolist()
    per_rank *= 1 + 60 * (seed % 7 == 6)  # also more experts than threads
    num_experts = ranks * per_rank
    ids = random_ids(ranks, tokens, choices, num_experts, generator)
    ids = ids.to([torch.int32, torch.int64][seed % 2])
    capacity = default_capacity(tokens, ranks, choices, per_rank)
    if seed % 3:
        capacity = max(1, capacity // 3)
    rank = seed % ranks
    actual = by_kernel(ids, rank, num_experts, capacity, level)
    right = routing_by_torch(ids, rank, num_experts, capacity)
    for table, definition in zip(flat(actual), flat(right), strict=True):
        assert torch.equal(table, definition)


@pytest.mark.parametrize("seed", [4, 6, 13])
def test_kernel(seed):
    check_kernel(seed, "tile")


def test_kernel_at_the_device_level():
    check_kernel(10, "device")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_kernel_for_many_routings(seed):
    check_kernel(seed, "device" if seed % 10 == 0 else "tile")


@pytest.mark.long
def test_kernel_of_as_many_choices_as_threads():
    ids = torch.randint(-1, 40, (8, 16, 8), generator=torch.Generator().manual_seed(0))
    assert ids.numel() == MOST_CHOICES and fits(ids, 40)
    actual = by_kernel(ids, 5, 40, 700, "tile")
    for table, definition in zip(
        flat(actual), flat(routing_by_torch(ids, 5, 40, 700)), strict=True
    ):
        assert torch.equal(table, definition)


def test_calls_use_the_kernel_for_few_choices(monkeypatch):
    """Both ranks use the same kernel, another capacity another one."""
    simulate_kernels(monkeypatch)
    ids = random_ids(2, 5, 3, 6, torch.Generator().manual_seed(4))
    for rank, capacity in ((0, 30), (1, 30), (1, 4)):
        results = (f(ids, rank, 6, capacity) for f in (routing_of, routing_by_torch))
        assert all(torch.equal(a, b) for a, b in zip(*map(flat, results), strict=True))
    assert len(local_kernels._KERNELS) == 2


@pytest.mark.long
def test_opcheck(monkeypatch):
    simulate_kernels(monkeypatch)
    ids = random_ids(2, 5, 3, 6, torch.Generator().manual_seed(4))
    torch.library.opcheck(torch.ops.tileweave.routing, (ids, 1, 6, 30))


def test_others_have_no_kernel():
    assert not has_kernel(torch.zeros(2, 3, 4).int(), 8)  # on a CPU
    assert fits(torch.zeros(8, 16, 8), 256)
    assert not fits(torch.zeros(8, 16, 9), 256)
    assert not fits(torch.zeros(8, 16, 8), 1 << 21)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_kernel_spills_no_registers(ptxas, dtype):
    config = RoutingConfig(8, 16, 8, 32, 1024, dtype)
    report = ptxas(tw.emit(routing_program(config), "ptx", world_size=1))
    assert "0 bytes spill stores, 0 bytes spill loads" in report


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
