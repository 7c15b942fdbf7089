"""Tables of a routing, against loops over experts and tokens."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tileweave as tw
from tests.ops.moe.by_definition import all_rows, kept_ids, random_ids
from tests.ops.moe.simulated_kernels import simulate_kernels
from tileweave.ops.core.tiles import SHARED_BYTES
from tileweave.ops.moe import local_kernels
from tileweave.ops.moe.kernels import routing as kernels
from tileweave.ops.moe.kernels.routing import RoutingConfig, routing_program
from tileweave.ops.moe.routing import (
    Routing,
    Tables,
    default_capacity,
    fits,
    has_kernel,
    masked_tables,
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


def masked(ids: torch.Tensor, rank: int, num_experts: int) -> tuple[Tables, torch.Tensor]:
    """Return the tables of the masked layout and the rows of each expert, by definition."""
    ranks, tokens, choices = ids.shape
    per_rank = num_experts // ranks
    capacity = per_rank * ranks * tokens
    source, place = torch.full((capacity,), -1), torch.full((tokens, choices), -1)
    slots, counts = torch.full((ranks * tokens, choices), -1), torch.zeros(num_experts)
    for owner, rows in enumerate(all_rows(ids, num_experts)):
        for row in rows:
            at = row.expert % per_rank * ranks * tokens + int(counts[row.expert])
            counts[row.expert] += 1
            if row.rank == rank:
                place[row.token, ids[rank, row.token] == row.expert] = owner * capacity + at
            if owner == rank:
                token = row.rank * tokens + row.token
                source[at] = token * choices + row.choice
                slots[token] = torch.cat([torch.tensor([at]), slots[token, :-1]])
    return Tables(source, slots, place), counts.view(ranks, per_rank)[rank]


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
    counts = np.full(config.blocks * num_experts, -7, np.int16)
    inputs |= {"ids": ids.numpy().reshape(-1), "this_rank": rank, "counts": counts}
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
    compare(ids, rank, num_experts, capacity, level)


def compare(ids: torch.Tensor, rank: int, num_experts: int, capacity: int, level: str) -> None:
    """Compare the kernels in the simulator with torch."""
    assert fits(ids, num_experts)
    actual = by_kernel(ids, rank, num_experts, capacity, level)
    right = routing_by_torch(ids, rank, num_experts, capacity)
    for table, definition in zip(flat(actual), flat(right), strict=True):
        assert torch.equal(table, definition)


@pytest.fixture(params=["one block", "blocks", "waves"])
def division(request, monkeypatch):
    """Divide few choices among blocks: none, one wave of each, or several waves of each."""
    if request.param != "one block":
        monkeypatch.setattr(kernels, "MAX_THREADS", 32)
        monkeypatch.setattr(kernels, "MAX_BLOCKS", 2 if request.param == "waves" else 128)


@pytest.mark.parametrize("seed", [4, 6, 13])
def test_kernel(division, seed):
    check_kernel(seed, "tile")


def test_kernel_at_the_device_level(division):
    check_kernel(10, "device")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_kernel_for_many_routings(division, seed):
    check_kernel(seed, "device" if seed % 10 == 0 else "tile")


@pytest.mark.long
def test_kernel_of_as_many_choices_as_threads():
    ids = torch.randint(-1, 40, (8, 16, 8), generator=torch.Generator().manual_seed(0))
    assert ids.numel() == kernels.MAX_THREADS
    compare(ids, 5, 40, 700, "tile")


def zipf(*shape: int, num_experts: int) -> torch.Tensor:
    """Return experts that are chosen in proportion to 1 / (number + 1)."""
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, num_experts + 1)
    ids = weights.multinomial(torch.Size(shape).numel(), replacement=True, generator=generator)
    return ids.view(shape)


def test_divisions():
    config = RoutingConfig(8, 8192, 8, 64, 524288, "int32")
    assert (config.blocks, config.waves, config.threads) == (128, 4, 1024)
    config = RoutingConfig(3, 1000, 3, 1, 3000, "int32")
    assert (config.blocks, config.waves, config.wave_choices) == (9, 1, 1023)
    assert RoutingConfig(4, 32, 8, 64, 1024, "int64").blocks == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernels_of_many_choices(dtype):
    compare(zipf(4, 131, 8, num_experts=512).to(dtype), 2, 512, 3000, "tile")


@pytest.mark.long
@pytest.mark.parametrize("ids, num_experts, capacity", [
    (torch.full((5, 700, 3), 4), 5, 3500),  # one expert on a rank, and one has all tokens
    (zipf(1, 999, 7, num_experts=1536), 1536, 100),
    (zipf(2, 2500, 1, num_experts=6) - 1, 4, 5000),
    (torch.full((3, 1000, 2), -1), 6, 10),
    (torch.arange(8 * 400 * 4).view(8, 400, 4) * 7 % 70 - 3, 64, 1),
])  # fmt: skip
def test_kernels_of_many_choices_for_all_ranks(ids, num_experts, capacity):
    for rank in range(len(ids)):
        compare(ids, rank, num_experts, capacity, "tile")


@pytest.mark.long
def test_kernels_of_several_waves():
    compare(zipf(2, 8300, 8, num_experts=32), 1, 32, 90000, "tile")


def test_calls_use_the_kernels(monkeypatch, division):
    """Both ranks use the same kernels, another capacity others."""
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
    def accepts(ranks, tokens, choices, num_experts):
        return fits(torch.empty(ranks, tokens, choices, device="meta"), num_experts)

    assert not has_kernel(torch.zeros(2, 3, 4).int(), 8)  # on a CPU
    assert accepts(8, 16, 8, 256) and accepts(8, 8192, 8, 512)
    assert accepts(1, 4, 1024, 1536) and accepts(8, 1 << 18, 8, 8)
    assert not accepts(8, 16, 8, 1544)
    assert not accepts(8, 16, 1025, 8)
    assert not accepts(8, (1 << 18) + 1, 1, 8)
    assert not accepts(8, 1 << 18, 1024, 8)
    assert not accepts(8, 0, 8, 8)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("tokens", [16, 999, 8192])
def test_kernels_spill_no_registers(ptxas, tokens, dtype):
    config = RoutingConfig(8, tokens, 8, 64, 64 * tokens, dtype)
    report = ptxas(tw.emit(routing_program(config), "ptx", world_size=1))
    kernels = 1 if config.blocks == 1 else 2
    assert report.count("0 bytes spill stores, 0 bytes spill loads") == kernels


@pytest.mark.parametrize("tokens", [16, 8192])
def test_counters_of_all_experts_fit_shared_memory(tokens):
    """TileLang reuses the memory of buffers that are no longer needed."""
    config = RoutingConfig(8, tokens, 8, kernels.MAX_EXPERTS // 8, 64, "int32")
    source = tw.emit(routing_program(config), "cuda", world_size=1)
    buffers = re.findall(r"(\w+) = \(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ (\d+)", source)
    table, other = 4 * config.warps * config.experts, 4 * config.segments * 32
    ends = [int(offset) + (table if name == "table" else other) for name, offset in buffers]
    assert len(ends) >= 7 and max(ends) <= SHARED_BYTES


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


@pytest.mark.parametrize("seed", range(12))
def test_masked_tables(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks, per_rank = 1 + seed % 3, 1 + seed % 4
    ids = random_ids(ranks, 4, 1 + seed % 5, ranks * per_rank, generator)
    for rank in range(ranks):
        tables, counts = masked_tables(ids, rank, ranks * per_rank)
        right, right_counts = masked(ids, rank, ranks * per_rank)
        assert all(map(torch.equal, (*tables, counts), (t.int() for t in (*right, right_counts))))
        assert {t.dtype for t in (*tables, counts)} == {torch.int32}
