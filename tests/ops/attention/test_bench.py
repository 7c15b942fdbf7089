"""Attention in ``tileweave bench``: its other implementations are references, so they must be
right."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tests.ops.attention import bench_on_ranks as bench_attention_on_ranks
from tests.ops.attention.bench_on_ranks import errors, expected, length_of, whole
from tests.runtime.plans.fakes import Ranks
from tileweave.bench import attention, results
from tileweave.bench import command as bench
from tileweave.bench.attention import IMPLEMENTATIONS, Inputs, problem_of
from tileweave.bench.case import Buffers, Missing
from tileweave.bench.programs import local_attention_plan
from tileweave.bench.results import Length, Result
from tileweave.bench.sdpa import (
    BACKENDS,
    Backend,
    PartialAttention,
    exact,
    in_order,
    ring_block,
    row_error,
)
from tileweave.cli.main import main
from tileweave.ops import shard_sequence
from tileweave.ops.attention.flash import FlashTiles, tiles_for
from tileweave.ops.attention.sp_attention import sp_attention_plan
from tileweave.ops.core import nccl
from tileweave.runtime.executor import compile_ahead
from tileweave.runtime.kernel.shared_kernels import SharedKernels

pytestmark = pytest.mark.long

OP = "sp_attention"
LAYOUTS = ("contiguous", "zigzag")
NAMES = ("ours", "sdpa/flash", "gather/flash", "ring/flash")
SHARDED = [(causal, layout) for causal in (True, False) for layout in LAYOUTS]


@pytest.mark.parametrize(("causal", "layout"), SHARDED)
def test_others_are_right_on_three_ranks(three, causal, layout):
    for completed in three.run(bench_attention_on_ranks.errors, 48, causal, layout):
        assert set(completed) == set(NAMES[1:])
        assert all(error < 1e-5 for error in completed.values()), completed


@pytest.mark.parametrize(("causal", "layout"), SHARDED)
def test_what_is_taken_for_right(three, causal, layout):
    """More rows than the reference computes in fp32."""
    for completed in three.run(bench_attention_on_ranks.right_results, 240, causal, layout):
        assert completed["result"] < 1e-5


@pytest.fixture
def no_network(monkeypatch):
    """Connect ranks that are threads by queues."""
    boxes = defaultdict(SimpleQueue)

    def start(given, to, got, source, group):
        for i, x in enumerate(given):
            boxes[group.rank, to, i].put(x.clone())
        works = []
        for i, x in enumerate(got):
            box = boxes[source, group.rank, i]
            works.append(SimpleNamespace(wait=lambda x=x, box=box: x.copy_(box.get(timeout=20))))
        return works

    def gather(x, group):
        for to in range(group.world_size):
            boxes["gather", group.rank, to].put(x)
        return torch.cat([
            boxes["gather", source, group.rank].get(timeout=20)
            for source in range(group.world_size)
        ])  # fmt: skip

    monkeypatch.setattr(nccl, "start_exchanges", start)
    monkeypatch.setattr(nccl, "all_gather", gather)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("causal", "layout"), SHARDED)
def test_others_are_right(no_network, every_rank, causal, layout, ranks):
    for actual in every_rank(lambda group: errors(64, causal, layout, group), ranks):
        assert isinstance(actual, dict), actual
        assert all(error < 1e-5 for error in actual.values()), actual


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("causal", "layout"), SHARDED)
def test_a_ring_computes_each_pair_once(causal, layout, ranks):
    length = 4 * ranks
    problem = problem_of(OP, length_of(length, causal, layout, ranks), ranks, torch.float32)
    pairs, rows = torch.zeros(length, length), torch.arange(problem.q_rows)
    for rank in range(ranks):
        for owner in range(ranks):
            if block := ring_block(problem, rank, owner):
                queries, keys = rows[block.queries], rows[block.keys]
                seen = torch.ones(len(queries), len(keys))
                queries = problem.sharding.position(queries, rank, length)
                keys = problem.sharding.position(keys, owner, length)
                pairs[queries[:, None], keys] += seen.tril() if block.causal else seen
    assert torch.equal(pairs, torch.ones(length, length).tril() if causal else pairs.new_ones(1)
                       .expand(length, length))  # fmt: skip


@pytest.mark.parametrize("ends_together", [True, False])
def test_the_last_query_sees_the_last_key(ends_together):
    """PyTorch's mask of a rectangle may differ."""
    q, k, v = whole(24, 1)
    right = expected(q, k, v, True)[:, 16:]
    calls = []

    def call(q, k, v, causal):
        calls.append((k.shape[2], causal))
        rows, columns = q.shape[2], k.shape[2]
        limit = torch.arange(rows) + 1 + (columns - rows if ends_together else 0)
        scores = q @ k.repeat_interleave(2, 1).mT * 16**-0.5
        if causal:
            scores.masked_fill_(torch.arange(columns) >= limit[:, None], -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - lse).exp() @ v.repeat_interleave(2, 1), lse, None

    actual = Backend(call, ends_together)(q[:, 16:], k, v, True)
    assert calls == ([(24, True)] if ends_together else [(16, False), (8, True)])
    assert torch.allclose(actual.out.transpose(1, 2), right.float(), atol=1e-6)
    assert actual.lse.shape == (2, 4, 8)


def test_sums_of_rounded_parts():
    """A ring of two ranks adds parts in their type: large values with little weight."""
    q, k, v = (x.bfloat16() for x in whole(512, 1))
    backend = BACKENDS["cpu"]["flash"]
    total = backend(q, k[:, :2], v[:, :2], False)
    total.add(backend(q, k[:, 2:], v[:, 2:], False))
    assert total.out.dtype == torch.bfloat16
    right = expected(q, k, v, False)
    assert row_error(total.out.transpose(1, 2), right) < Length.tolerance


def test_a_part_of_rows_is_added_in_place():
    total = PartialAttention(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4))
    total.add(
        PartialAttention(torch.ones(1, 1, 2, 2), torch.full((1, 1, 2), 100.0)), slice(2, None)
    )
    assert torch.equal(total.out[0, 0, :, 0], torch.tensor([0.0, 0, 1, 1]))
    assert torch.equal(total.lse[0, 0], torch.tensor([0.0, 0, 100, 100]))


@pytest.mark.parametrize(("name", "keys"), [("flash", 192), ("cudnn", 64)])
def test_pytorch_takes_what_its_back_ends_are_called_with(name, keys):
    with FakeTensorMode():
        q, k = (
            torch.empty(2, rows, heads, 128, dtype=torch.bfloat16, device="cuda")
            for rows, heads in ((64, 32), (keys, 8))
        )
        actual = BACKENDS["cuda"][name](q, k, k, True)
        assert actual.out.shape == (2, 32, 64, 128) and actual.lse.shape == (2, 32, 64)
        assert actual.lse.dtype == torch.float32


def test_the_benchmark(three, tmp_path):
    file, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    (right, said), *others = three.run(bench_attention_on_ranks.benchmark, str(file), str(figure))
    assert (right, others) == (True, [(True, "")] * 2)
    kinds = ("causal zigzag", "full zigzag")
    shapes = [f"{b} x {n} {kind}" for kind in kinds for b in (1, 2) for n in (96, 240)]
    lines = said.splitlines()
    rows = [line for line in lines if line.endswith("nccl: the tensors are on cpu; expected cuda")]
    assert [row[22:50].strip() for row in rows] == shapes
    assert said.count("ring/cudnn: -: torch has none on cpu") == 1
    machine, loaded = results.load(str(file))
    assert machine["ranks"] == 3 and results.table(loaded)[1:] == rows
    for r in loaded:
        assert set(r.ms) == set(NAMES) and all(ms > 0 for ms in r.ms.values())
        assert all(0 < error < r.shape.tolerance for error in r.errors.values()), r.errors
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert json.loads(file.read_text())["results"][0]["shape"]["causal"] is True


def by_exact(problem, rank, q, k_by_rank, v_by_rank):
    """Return q of a rank as (batch, rows, heads, head_dim), and k and v as (ranks, batch, rows,
    ...)."""
    k, v = (in_order(problem, x) for x in (k_by_rank, v_by_rank))
    seen = torch.full((problem.q_rows,), problem.k_total)
    if problem.causal:
        rows = torch.arange(problem.q_rows)
        seen = problem.sharding.position(rows, rank, problem.q_total) + 1
    return exact(q, k, v, seen)


@pytest.mark.parametrize(("causal", "layout"), [(True, "zigzag"), (False, "contiguous")])
def test_the_kernel_alone(causal, layout):
    problem = problem_of(OP, Length(1, 128, 2, 1, 64, causal, layout, 2), 2, torch.bfloat16)
    plan = local_attention_plan(problem, FlashTiles(64, 32, 2, 128))
    assert "nothing is inserted" in str(tw.explain(plan, 2))
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((2, 1, 64, heads, 64)).astype(ml_dtypes.bfloat16) for heads in (2, 1, 1)
    )
    parts = problem.sharding.parts
    held = {name: x.reshape(2, 1, 64, 64) for name, x in (("K", k), ("V", v))}
    inputs = [{"Q": x.reshape(1, parts, -1, 2, 64), **held} for x in q]
    out = tw.simulate(plan, 2, inputs, schedules=1, epochs=1)
    q, k, v = (torch.from_numpy(x.astype(np.float32)) for x in (q, k, v))
    for rank, actual in enumerate(out):
        actual = torch.from_numpy(actual["OUT"].astype(np.float32)).flatten(1, 2)
        assert row_error(actual, by_exact(problem, rank, q[rank], k, v)) < Length.tolerance


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_alone_finds_all_keys(every_rank, monkeypatch, layout):
    """Memory is larger than needed; the kernel is torch."""
    world = Ranks(2, monkeypatch)
    problem = problem_of(OP, length_of(32, True, layout, 2), 2, torch.float32)
    given = {rank: inputs_of(problem, rank) for rank in range(2)}

    def kernel(q, k, v, out, lse):
        rank = world.here.session.group.rank
        mine = by_exact(problem, rank, q.flatten(1, 2), *(
            x[rank].unflatten(3, (problem.kv_heads, -1)) for x in (k, v)
        ))  # fmt: skip
        out.copy_(mine.view_as(out))
        lse.fill_(0)

    monkeypatch.setattr(attention, "local_attention_plan", lambda *_: kernel)

    def rank(group):
        world.join(group)
        room = world.here.session.heap.allocate((5 * given[0].k_all.numel(),), torch.float32)
        buffers = Buffers(problem, replace(group, device=torch.device("cuda")), room)
        implementation = IMPLEMENTATIONS["local"](buffers)
        implementation.prepare(given[group.rank])
        actual = implementation.result(implementation.call(given[group.rank]))
        return implementation.error(actual, implementation.expected(given[group.rank])).item()

    for error in every_rank(rank, 2):
        assert isinstance(error, float) and error < 1e-5, error


def inputs_of(problem, rank):
    q, k, v = whole(problem.k_total, problem.ranks)
    right = shard_sequence(expected(q, k, v, problem.causal), rank, problem.ranks, problem.layout)
    k_by_rank, v_by_rank = (
        torch.stack([shard_sequence(x, r, problem.ranks, problem.layout) for r in range(2)])
        for x in (k, v)
    )
    q = shard_sequence(q, rank, problem.ranks, problem.layout)
    return Inputs(q, k_by_rank[rank], v_by_rank[rank], k_by_rank, v_by_rank, k, v, right)


def test_without_a_gpu_or_room_there_is_no_kernel_alone():
    problem = problem_of(OP, length_of(32, True, "zigzag", 2), 2, torch.bfloat16)
    for kind, why in (("cpu", "there is no GPU"), ("cuda", "the symmetric heap has no room")):
        group = SimpleNamespace(device=torch.device(kind))
        with pytest.raises(Missing, match=why):
            IMPLEMENTATIONS["local"](Buffers(problem, group, None))


def test_what_will_run_is_compiled_ahead(every_rank):
    problem = problem_of(OP, Length(1, 1024, 4, 1, 64, True, "zigzag", 2), 2, torch.bfloat16)
    heap = SimpleNamespace(stride=1 << 30)
    alone = sp_attention_plan(problem, tiles_for(problem))
    programs = [alone], attention.programs(problem, None)

    def rank(group):
        session = SimpleNamespace(group=group, heap=heap, kernels=SharedKernels())
        kernels = [
            compile_ahead._for_group(each, session.group.world_size, session.heap.stride)
            for each in programs
        ]
        return [len(compile_ahead._kernels(each, session.kernels)) for each in kernels]

    (ours, both), other = every_rank(rank)
    assert other == [ours, both] and ours > 0 and both == ours + 1


@pytest.mark.parametrize("wrong", ["ours", "ring/flash"])
def test_one_wrong_number_in_one_row(three, tmp_path, wrong):
    file = str(tmp_path / "bench.json")
    (right, said), *_ = three.run(bench_attention_on_ranks.benchmark, file, None, wrong)
    assert right == (wrong != "ours")
    assert said.count("WRONG") == (0 if right else 8)
    assert said.count("ring/flash: wrong for") == (8 if right else 0)


def result(length=65536, causal=True, **ms):
    shape = Length(1, length, 32, 8, 128, causal, "zigzag", 4)
    return Result("sp_attention", shape, "fused", "asked for", ms, dict.fromkeys(ms, 0.0), 1)


MS = {
    "ours": 2.0, "local": 1.6, "sdpa/flash": 3.0, "sdpa/cudnn": 1.5, "gather/flash": 5.0,
    "gather/cudnn": 3.0, "ring/flash": 4.0, "ring/cudnn": 7.0,
}  # fmt: skip


def test_ratios(tmp_path, capsys):
    r = result(**MS)
    assert (r.ideal, r.best_other) == (1.6, 3.0)
    flops = 4 * 32 * 128 * 65536 * 65537 / 2 / 4
    assert r.teraflops("ours") == pytest.approx(flops / 2e-3 / 1e12)
    assert result(causal=False, **MS).shape.flops == 4 * 32 * 128 * 65536**2 / 4
    file, figure = str(tmp_path / "bench.json"), tmp_path / "bench.png"
    results.save(file, {"ranks": 4, "device": "a GPU", "dtype": "bfloat16"}, [r])
    assert main(["bench", "--from", file, "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    head, row, *summary = capsys.readouterr().out.splitlines()
    assert (
        head.endswith("how") and row.split()[:6] == "sp_attention 1 x 65536 causal zigzag".split()
    )
    rates = [f"{r.teraflops(name):.0f}" for name in ("ours", "local", "sdpa/cudnn")]
    times, ratios = ["2.000", "1.600", "1.500", "3.000", "4.000"], "1.250 1.500 2.000 0.938".split()
    assert row.split()[6:18] == [*times, *rates, *ratios]
    where = "(1 x 65536 causal zigzag)"
    assert summary == [
        "sp_attention, 1 shapes",
        f"  ours / ideal       geometric mean 1.250, worst 1.250 {where}",
        f"  gather / ours      geometric mean 1.500, worst 1.500 {where}",
        f"  ring / ours        geometric mean 2.000, worst 2.000 {where}",
        f"  best other / ours  geometric mean 1.500, worst 1.500 {where}",
    ]


def test_who_is_not_there_has_a_dash():
    (_, row) = results.table([result(ours=2.0)])
    assert row.split()[7:11] == ["-"] * 4 and row.split()[-1] == "fused"


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [
        (
            ["--sizes", "8192,16384", "--batch", "1", "4"],
            [Length(b, n, 32, 8, 128, c, "zigzag", 1) for c in (True, False) for b in (1, 4)
             for n in (8192, 16384)],
        ),
        (
            ["--shapes", "16x2x64", "--layout", "contiguous", "--sizes", "64"],
            [Length(1, 64, 16, 2, 64, causal, "contiguous", 1) for causal in (True, False)],
        ),
    ],
)  # fmt: skip
def test_options(arguments, shapes, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run", lambda wanted: seen.append(wanted) or True)
    assert main(["bench", "sp_attention", *arguments]) == 0
    actual = [(case.op, case.shape) for case in seen[0].cases()]
    assert actual == [("sp_attention", shape) for shape in shapes]


def test_what_is_measured_by_default():
    cases = bench.BenchOptions(["attention"]).cases()
    assert len(cases) == 2 * 6
    assert cases[-1].symmetric_bytes == 2 * 2 * 262144 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "0"], "bench: --sizes 0; expected a positive integer"),
        (["--sizes", "64", "--batch", "x"], "bench: --batch x; expected a positive integer"),
        (["--sizes", "63"], "sp_attention: length=63; expected a multiple of 2 for 1 ranks and "),
        (["--sizes", "64", "--layout", "ring"], "sp_attention: layout='ring'; expected 'contig"),
        (
            ["--sizes", "64", "--shapes", "12x8x128"],
            "sp_attention: q has 12 heads; expected a multiple of the 8 of k and v",
        ),
        (["--shapes", "12x8"], "bench: --shapes 12x8; expected HEADSxKV_HEADSxHEAD_DIM"),
    ],
)
def test_refused(arguments, message, capsys):
    assert main(["bench", "attention", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_attention_is_not_tuned():
    with pytest.raises(tw.TileWeaveError, match="tune: sp_attention; expected all_gather_matmul"):
        bench.BenchOptions(["sp_attention"], command="tune").cases()
