"""``tileweave bench`` on ranks that are processes of a CPU: measured and checked implementations,
and reports."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import tileweave as tw
from tests.groups import open_sessions
from tests.ops import on_ranks
from tests.runtime.plans.fakes import Ranks
from tileweave.bench import case, collectives, gemm, results
from tileweave.bench import command as bench
from tileweave.bench.case import Checker, Implementation
from tileweave.bench.programs import matmul_program
from tileweave.bench.results import Result, Shape, Size
from tileweave.cli.main import main
from tileweave.ops.autotune.trial import problem_of
from tileweave.ops.collectives import transport
from tileweave.ops.collectives.all_gather import AllGather
from tileweave.ops.collectives.all_reduce import AllReduce
from tileweave.ops.collectives.all_to_all import AllToAll
from tileweave.ops.collectives.collective import Collective
from tileweave.ops.core import compiled as op_cache
from tileweave.ops.core.compiled import OpCache
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.core.tiles import LARGE, Tiles
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime.executor import compile_ahead
from tileweave.runtime.host.heap import FreeList, HeapExhausted
from tileweave.runtime.kernel.shared_kernels import SharedKernels

pytestmark = pytest.mark.long

NAMES = ("ours", "product/cublas", "exchange/nccl", "nccl")
PNG = b"\x89PNG"


def test_all_operators(three, tmp_path):
    file, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    (right, table), *others = three.run(on_ranks.benchmark, str(file), str(figure))
    assert (right, others) == (True, [(True, "")] * 2)
    rows = [line for line in table.splitlines() if line.endswith("expected cuda")]
    assert [row.split()[0] for row in rows] == [
        *["all_gather_matmul"] * 2, *["matmul_all_reduce"] * 2, *["matmul_reduce_scatter"] * 2
    ]  # fmt: skip
    assert table.count("async_tp: -: there is no GPU") == 1
    data = json.loads(file.read_text())
    assert (data["ranks"], data["dtype"], len(data["results"])) == (3, "bfloat16", 6)
    for result in data["results"]:
        assert result["strategy"] == "nccl" and "expected cuda" in result["reason"]
        assert set(result["ms"]) == set(result["errors"]) == set(NAMES)
        assert all(ms > 0 for ms in result["ms"].values())
        exact = result["op"] == "all_gather_matmul"  # to copy, not to add
        assert (result["errors"]["exchange/nccl"] == 0) == exact
        assert all(0 < result["errors"][name] < 1e-2 for name in ("ours", "nccl"))
    assert figure.read_bytes().startswith(PNG)


def test_wrong_results_of_ours(three, tmp_path):
    file = str(tmp_path / "bench.json")
    for rank, (right, table) in enumerate(three.run(on_ranks.benchmark, file, None, ("auto",))):
        assert not right
        assert table.count("WRONG") == (6 if rank == 0 else 0)


def test_nothing_is_compared_with_wrong_results(three, tmp_path):
    file = str(tmp_path / "bench.json")
    (right, table), *_ = three.run(on_ranks.benchmark, file, None, ("nccl",))
    assert right
    assert table.count("nccl: wrong for") == 6
    assert "loses" not in table and "nccl / ours" not in table


@pytest.mark.parametrize("broken", [0, 2])
def test_who_raises_on_one_rank_is_left_out_on_all(three, broken):
    for completed, why in three.run(on_ranks.who_takes_part, broken):
        assert completed == list(NAMES)
        assert why["async_tp"] == "RuntimeError: no memory"


def test_async_tp_is_called_as_torch_wants_it(three):
    for errors in three.run(on_ranks.async_tp):
        assert len(errors) == 2 and all(0 <= error < 1e-5 for error in errors.values()), errors


def test_the_worst_run_counts():
    checker = Checker({"a": Implementation(lambda x: x, expected=lambda given: given)})
    right = torch.tensor([3.0, 4.0])
    for actual in (right, torch.tensor([3.0, 3.0]), right):
        checker("a", right, actual)
    assert checker.errors == {"a": pytest.approx(0.2)}
    checker("a", right, torch.tensor([3.0, torch.nan]))
    checker("a", right, right)
    assert checker.errors == {"a": float("inf")}


def result(ms, M=1024, op="matmul_reduce_scatter", **errors):
    return Result(
        op, Shape("", M, 8, 8), "fused", "it can be", ms, dict.fromkeys(ms, 0.0) | errors, 1
    )


def test_ideal_and_best_other():
    ms = {
        "ours": 3, "product/cublas": 5, "product/tilelang": 2, "exchange/nccl": 1,
        "exchange/copies": 4, "nccl": 6, "async_tp": 4,
    }  # fmt: skip
    r = result(ms)
    assert (r.best("product/"), r.best("exchange/"), r.ideal, r.best_other) == (2, 1, 2, 4)
    r = result(ms, **{"product/tilelang": 1.0, "async_tp": float("inf")})
    assert (r.best("product/"), r.ideal, r.best_other) == (5, 5, 6)
    assert result({"ours": 3, "nccl": 6}).ideal is None


def test_losing_shapes_are_told():
    halves = {"product/cublas": 1.0, "exchange/nccl": 0.5}
    actual = [
        result({"ours": 1.0, "nccl": 4.0, **halves}),
        result({"ours": 2.0, "nccl": 4.0, "async_tp": 1.0, **halves}, M=2048),
    ]
    assert results.summary(actual) == [
        "matmul_reduce_scatter, 2 shapes",
        "  ours / ideal       geometric mean 1.414, worst 2.000 (2048 x 8 x 8)",
        "  nccl / ours        geometric mean 2.828, worst 2.000 (2048 x 8 x 8)",
        "  async_tp / ours    geometric mean 0.500, worst 0.500 (2048 x 8 x 8)",
        "  best other / ours  geometric mean 1.414, worst 0.500 (2048 x 8 x 8)",
        "  loses: 2048 x 8 x 8: ours 2.000, best other 1.000 ms",
    ]


def test_a_run_can_be_drawn_elsewhere(tmp_path, capsys):
    file, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    ms = {"ours": 1.0, "product/cublas": 1.0, "exchange/nccl": 0.5, "nccl": 1.5}
    machine = {"ranks": 2, "device": "a GPU", "dtype": "bfloat16"}
    actual = [result(ms), result(ms, M=2048, op="all_gather_matmul")]
    results.save(str(file), machine, actual)
    assert results.load(str(file)) == (machine, actual)
    assert main(["bench", "--from", str(file), "--figure", str(figure)]) == 0
    assert figure.read_bytes().startswith(PNG)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    times = "1.000 1.000 0.500 1.500 - 1.000 - 1.500 0.0e+00 1 s fused".split()
    assert ["all_gather_matmul", *"2048 x 8 x 8".split(), *times] in rows


def test_a_figure_that_cannot_be_written(tmp_path, capsys):
    file, figure = tmp_path / "bench.json", tmp_path / "bench.png"
    ms = {"ours": 1.0, "product/cublas": 1.0, "exchange/nccl": 0.5, "nccl": 1.5}
    machine = {"ranks": 2, "device": "a GPU", "dtype": "bfloat16"}
    results.save(str(file), machine, [result(ms)])
    figure.symlink_to("/dev/full")
    assert main(["bench", "--from", str(file), "--figure", str(figure)]) == 1
    said = f"bench: --figure {figure}: No space left on device; expected a file that can be written"
    assert said in capsys.readouterr().err


def test_wrong_results_are_written_as_json(tmp_path):
    """JSON has no infinite numbers."""
    file = tmp_path / "bench.json"
    wrong = result({"ours": 1.0, "nccl": 1.5}, ours=math.inf)
    results.save(str(file), {}, [wrong])

    def refused(name):
        raise AssertionError(name)

    json.loads(file.read_text(), parse_constant=refused)
    assert results.load(str(file)) == ({}, [wrong])


@pytest.mark.parametrize(
    "change",
    [
        {"ms": {}, "errors": {}},
        {"errors": {"ours": 0.0}},
        {"ms": {"ours": "1", "nccl": 1.5}},
        {"ms": {"ours": 0.0, "nccl": 1.5}},
        {"ms": {"ours": math.nan, "nccl": 1.5}},
        {"ms": [1.0]},
        {"seconds": None},
        {"op": ["all_gather"]},
        {"shape": {"name": "", "M": "8", "N": 8, "K": 8}},
    ],
)
def test_what_was_not_measured_is_not_printed(tmp_path, change, capsys):
    file = tmp_path / "bench.json"
    results.save(str(file), {}, [result({"ours": 1.0, "nccl": 1.5})])
    said = json.loads(file.read_text())
    said["results"][0] |= change
    file.write_text(json.dumps(said))
    assert main(["bench", "--from", str(file)]) == 1
    assert "expected what tileweave bench --json has written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reduce"], "bench: reduce; expected all_gather_matmul, matmul_all_reduce, matmul_redu"),
        (["--sizes", "0"], "bench: --sizes 0; expected a positive integer"),
        (
            ["all_gather", "--shapes", "llama8b"],
            "bench: --shapes llama8b of all_gather; expected --sizes only",
        ),
        (
            ["all_gather", "all_reduce", "--figure", "bench.png"],
            "bench: --figure bench.png of all_gather, all_reduce; expected one of all_gather_matmu",
        ),
        (["--shapes", "llama7b"], "bench: --shapes llama7b; expected llama8b, llama70b, llama405b"),
        (["--shapes", "12x0x4"], "bench: --shapes 12x0x4; expected"),
        (["--sizes", "1024,many"], "bench: --sizes many; expected a positive integer"),
        (["--batch", ","], "bench: --batch ,; expected at least one, with commas or spaces"),
        (["--shapes", ""], "bench: --shapes ; expected at least one, with commas or spaces"),
        (["--sizes", ",", ","], "bench: --sizes , ,; expected at least one, with commas or spaces"),
        (["--shapes", "1x1x2147483648"], "bench: --shapes 1x1x2147483648; expected"),
        (["--sizes", "2147483648"], "expected a positive integer up to 2147483647"),
        (["--json", "a" * 300], ": File name too long; expected a file that can be written"),
        (["--sizes", "1024", "all_gather_matmul"], " (operators precede the options)"),
        (["--json", "no/where.json"], "bench: --json no/where.json; expected a name in a folder"),
        (["--figure", "bench.svg"], "bench: --figure bench.svg; expected a name that ends in .png"),
        (["--from", "no.json"], "no.json'; expected what tileweave bench --json has written"),
        (["--from", __file__], "expected what tileweave bench --json has written"),
    ],
)
def test_refused(arguments, message, capsys):
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "case", "example"),
    [
        ([], "all_gather_matmul 1024 x 28672 x 8192", "--shapes 256x512x512"),
        (["sp_attention"], "sp_attention", "--sizes 256"),
        (["all_reduce", "--sizes", "8192"], "all_reduce 8192 MiB", "--sizes 1"),
    ],
)
def test_large_cases_are_refused_without_a_gpu(arguments, case, example, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "join", lambda cases: pytest.fail("measured"))
    assert main(["bench", *arguments]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"tileweave: bench: {case}")
    assert "torch sees no GPU; expected a GPU, or at most 4.3e+09 operations" in message
    assert f"{example}`" in message


def test_a_figure_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--figure", "bench.png"]) == 1
    message = "bench: --figure needs matplotlib, which is not installed; expected `pip install"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [["64,128"], ["64", "128"], ["64,", "128"]])
def test_lists_have_commas_or_spaces(given, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run", lambda wanted: seen.append(wanted) or True)
    assert main(["bench", "all_gather_matmul", "--sizes", *given, "--shapes", "llama8b"]) == 0
    (options,) = seen
    assert options == bench.BenchOptions(
        ["all_gather_matmul"], ["llama8b"], [64, 128], [], routings=["uniform"]
    )


def test_what_is_measured_by_default():
    def names(*given):
        return [(case.op, str(case.shape)) for case in bench.BenchOptions(*given).cases()]

    gemms = [(op, "8 x 8 x 8") for op in operators_of(GemmOperator)]
    assert names([], ["8x8x8"]) == names(["gemm"], ["8x8x8"]) == gemms
    assert names(["collectives"], [], [2]) == [(op, "2 MiB") for op in COLLECTIVES]
    sizes = [("all_to_all", f"{size} MiB") for size in (1, 16, 64, 256)]
    rows = [("all_gather_matmul", f"{M} x 28672 x 8192") for M in gemm.ROWS]
    assert names(["all_to_all", "all_gather_matmul"]) == [*sizes, *rows]


def test_shapes_of_models():
    gather, reduce, scatter = (
        gemm.shapes_of(operator, ["llama70b"], [1024])
        for operator in operators_of(GemmOperator).values()
    )
    assert gather == [Shape("llama70b", 1024, 28672, 8192)]
    assert scatter == reduce == [Shape("llama70b", 1024, 8192, 28672)]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_alone(transposed):
    M, N, K = 40, 56, 24
    program = matmul_program(M, N, K, "float16", transposed, Tiles(16, 16, 16, 2, threads=32))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float16) for shape in ((M, K), (K, N)))
    inputs = [{"A": a, "B": b.T.copy() if transposed else b}]
    (out,) = tw.simulate(program, world_size=1, inputs=inputs, schedules=1)
    assert np.array_equal(out["C"], a.astype(np.float32) @ b.astype(np.float32))


def test_the_product_alone_is_a_kernel_of_stock_tilelang():
    source = tw.emit(matmul_program(1000, 2056, 1800, "bfloat16", True, LARGE))
    assert "wgmma" in source and "tileweave" not in source and "tw::" not in source


def test_the_all_gather_alone():
    ranks, elements = 3, 32
    rng = np.random.default_rng(0)
    a = [rng.standard_normal(elements).astype(ml_dtypes.bfloat16) for _ in range(ranks)]
    out = tw.simulate(
        AllGather.copies(elements, ranks, "bfloat16"), ranks, [{"A": x} for x in a], schedules=3
    )
    assert all(np.array_equal(o["received"], np.stack(a)) for o in out)


def test_the_all_to_all_alone():
    ranks, elements = 3, 32
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 9, (ranks, ranks, elements)).astype(ml_dtypes.bfloat16)
    plan = AllToAll.copies(elements, ranks, "bfloat16")
    out = tw.simulate(plan, ranks, [{"A": x} for x in a], schedules=3)
    assert all(np.array_equal(o["received"], a[:, rank]) for rank, o in enumerate(out))


COLLECTIVES = tuple(operators_of(Collective))


def test_all_collectives(three, tmp_path):
    file = tmp_path / "bench.json"
    (right, said), *others = three.run(on_ranks.benchmark_of_collectives, str(file))
    assert (right, others) == (True, [(True, "")] * 2)
    lines = said.splitlines()
    rows = [line for line in lines if line.endswith("nccl: the tensors are on cpu; expected cuda")]
    assert [row.split()[:3] for row in rows] == [[op, "1", "MiB"] for op in COLLECTIVES]
    for name in ("copy_engine", "ldst", "ll"):
        assert lines.count(f"  transport/{name}: -: the tensors are on cpu; expected cuda") == 1
    machine, loaded = results.load(str(file))
    assert machine["ranks"] == 3 and [r.op for r in loaded] == list(COLLECTIVES)
    for r in loaded:
        assert r.errors == {"ours": 0, "nccl": 0} and all(ms > 0 for ms in r.ms.values())
    assert results.table(loaded)[1:] == rows


@pytest.mark.parametrize("wrong", ["ours", "nccl"])
def test_one_wrong_element_of_a_collective(three, tmp_path, wrong):
    file = str(tmp_path / "bench.json")
    (right, said), *_ = three.run(on_ranks.benchmark_of_collectives, file, wrong)
    assert right == (wrong == "nccl")
    assert said.count("WRONG") == (0 if right else len(COLLECTIVES))
    assert said.count("nccl: wrong for") == (len(COLLECTIVES) if right else 0)


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_gather", 3), ("reduce_scatter", 3 / 4), ("all_reduce", 6 / 4), ("all_to_all", 3 / 4)],
)
def test_bus_bandwidth(op, factor, tmp_path, capsys):
    """1 GB in 1 ms is 1000 GB/s; of four ranks, three are peers."""
    ms = {"ours": 2.0, "transport/ldst": 1.0, "nccl": 3.0, "exchange/copies": 1.5}
    r = Result(op, Size(10**9, 4), "ldst", "asked for", ms, dict.fromkeys(ms, 0.0), 1)
    assert r.rate("ours") == pytest.approx(500 * factor)
    assert (r.ideal, r.best_other, r.rate("transport/ll")) == (1.5, 3, None)
    file = str(tmp_path / "bench.json")
    results.save(file, {"ranks": 4}, [r])
    assert main(["bench", "--from", file]) == 0
    rates = [f"{1000 * factor / t:.1f}" for t in (2, 1, 3, 1.5)]
    ours, ldst, nccl, copies = rates
    row = ["2.000", ours, "-", ldst, "-", nccl, copies, "1.333", "-", "1.500"]
    assert row == capsys.readouterr().out.splitlines()[1].split()[3:13]


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_transport_is_compiled_ahead(op, monkeypatch):
    size = collectives.size_of(1, 3)
    assert size.bytes >= 1 << 20 and size.bytes % (3 * 16) == 0
    problem = collectives.problem_of(op, size, torch.bfloat16)
    group = types.SimpleNamespace(device=torch.device("cuda"), world_size=3)
    possible = set(OPERATORS[op].transports()) - {"ll"}
    monkeypatch.setattr(collectives, "obstacle", lambda name, *_: name not in possible)
    names = [program.__class__.__name__ for program in collectives.programs(problem, group)]
    by_engines = ["Plan"] if "copy_engine" in possible else []
    assert names == [*by_engines, *["PrimFunc"] * len(possible - {"copy_engine"})]


@pytest.mark.parametrize(
    ("op", "M", "kernels"),
    [
        ("all_gather_matmul", 256, 0), ("all_gather_matmul", 512, 1),
        ("all_gather_matmul", 4096, 2),
        ("matmul_reduce_scatter", 256, 1),
        ("matmul_reduce_scatter", 4096, 4), ("matmul_all_reduce", 256, 1),
    ],
)  # fmt: skip
def test_what_will_run_is_compiled_ahead(monkeypatch, every_rank, op, M, kernels):
    """The product alone, and the kernels of the operator if there is a GPU, unless it
    is passed in."""
    problem = problem_of(op, M, 2 * M, 2 * M, 2, torch.bfloat16)
    heap = types.SimpleNamespace(stride=1 << 30)

    def rank(group):
        session = types.SimpleNamespace(group=group, heap=heap, kernels=SharedKernels())
        programs = compile_ahead._for_group(
            gemm.programs(problem, group), session.group.world_size, session.heap.stride
        )
        return len(compile_ahead._kernels(programs, session.kernels))

    assert every_rank(rank) == [1, 1]
    monkeypatch.setattr(gemm, "unfused_gemm_strategy", lambda *_: None)
    assert every_rank(rank) == [1 + kernels] * 2


def test_copies_alone_bring_the_rows_of_all(every_rank, monkeypatch):
    """Memory is larger than needed; copies are real, streams are not."""
    world = Ranks(2, monkeypatch)
    a = torch.randn(2, 24, 16).bfloat16()
    rows = a.view(48, 16)

    def rank(group):
        world.join(group)
        monkeypatch.setattr(case, "barrier", lambda group: world.here.session.group.meet("b"))
        problem = problem_of("all_gather_matmul", 48, 32, 16, 2, torch.bfloat16)
        room = world.here.session.heap.allocate((rows.numel() + 24,), torch.bfloat16)
        room.local.fill_(7)
        buffers = case.Buffers(problem, group, room)
        implementation = gemm.IMPLEMENTATIONS["exchange/copies"](buffers)
        given = types.SimpleNamespace(a=a[group.rank], rows=rows)
        implementation.prepare(given)
        unwritten = room.local[: rows.numel()].isnan().all() and (room.local[-24:] == 7).all()
        group.meet("prepared")
        actual = implementation.result(implementation.call(given))
        return bool(unwritten), torch.equal(actual, implementation.expected(given))

    assert every_rank(rank, 2) == [(True, True)] * 2


def copies_of(op):
    return collectives.plan_of_copies(collectives.problem_of(op, Size(96, 2), torch.bfloat16))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("op", COLLECTIVES)
def test_inputs_are_matrices(op, ranks):
    """Some collectives accept nothing else, or divide the rows among the ranks."""
    size = collectives.size_of(1, ranks)
    shape = collectives.problem_of(op, size, torch.bfloat16).shape
    assert len(shape) == 2 and shape[0] % ranks == 0 and 2 * shape[0] * shape[1] == size.bytes


@pytest.mark.parametrize("op", [op for op in COLLECTIVES if copies_of(op) is not None])
def test_copies_alone_exchange(op, every_rank, monkeypatch):
    """Memory is larger than needed; copies are real, streams are not."""
    world = Ranks(2, monkeypatch)
    problem = collectives.problem_of(op, Size(96, 2), torch.bfloat16)
    x = torch.randn(2, *problem.shape).bfloat16()
    rights = [OPERATORS[op].expected(x, rank, *problem.options) for rank in range(2)]

    def rank(group):
        world.join(group)
        monkeypatch.setattr(case, "barrier", lambda group: world.here.session.group.meet("b"))
        room = world.here.session.heap.allocate((rights[0].numel() + 24,), torch.bfloat16)
        room.local.fill_(7)
        buffers = case.Buffers(problem, group, room)
        implementation = collectives.IMPLEMENTATIONS["exchange/copies"](buffers)
        given = collectives.Inputs(x[group.rank], rights[group.rank])
        implementation.prepare(given)
        unwritten = room.local[:-24].isnan().all() and (room.local[-24:] == 7).all()
        group.meet("prepared")
        actual = implementation.result(implementation.call(given))
        return bool(unwritten), torch.equal(actual, implementation.expected(given))

    assert every_rank(rank, 2) == [(True, True)] * 2


def test_what_is_made_for_one_size_is_freed_behind_it(monkeypatch):
    freed = []

    class StandIn(AllReduce):
        def __init__(self, problem, transport, session):
            self.transport = transport

        def __call__(self, x, out):
            if self.transport == "ldst":
                raise RuntimeError("no memory")
            out.copy_(x)

        def free(self):
            freed.append(self.transport)

        obstacle = staticmethod(lambda problem, name: {"ll": "so"}.get(name))

    size = collectives.size_of(1, 1)
    problem = collectives.problem_of("all_reduce", size, torch.bfloat16)
    group = group_of("")
    cache = types.SimpleNamespace(create=lambda problem, name, make: make(problem, name, None))
    monkeypatch.setitem(collectives.OPERATORS, "all_reduce", StandIn)
    monkeypatch.setattr(collectives, "op_cache_of", lambda _: cache)
    monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
    memory, random = collectives.stage(problem, group)
    buffers, inputs = case.Buffers(problem, group, None, memory), next(random)
    others = {n: make for n, make in collectives.IMPLEMENTATIONS.items() if n != "ours"}
    implementations, missing = case.implementations_of(buffers, inputs, 1, others)
    assert list(implementations) == ["transport/copy_engine", "nccl"]
    assert missing == {
        "transport/ldst": "RuntimeError: no memory",
        "transport/ll": "so",
        "exchange/copies": "copy engines do not add",
    }
    checker = Checker(implementations)
    for name, implementation in implementations.items():
        implementation.prepare(inputs)
        checker(name, inputs, implementation.call(inputs))
    assert checker.errors == {"transport/copy_engine": 0, "nccl": 0}
    buffers.close()
    assert freed == ["copy_engine", "ldst"]


def test_words_with_flags_count_twice():
    """In symmetric memory of 1 MiB on each of 4 ranks, by all transports and the largest again."""
    words, limit = collectives.symmetric_bytes("all_reduce", Size(1 << 20, 4)), 1 << 20
    assert words == limit * (2 + 4 + 8 + 8)
    more = collectives.symmetric_bytes("all_reduce", Size(2 << 20, 4))
    assert more == 2 * limit * (2 + 4 + 4)
    few = collectives.symmetric_bytes("all_gather", Size(64 << 10, 4))
    assert few == (64 << 10) * 4 * (1 + 2 + 4 + 4)


def test_each_size_finds_the_heap_empty(monkeypatch):
    """The heap fits all transports of the largest size and one result, but not another size beside
    it."""
    sizes = [Size(4 << 10, 1), Size(16 << 10, 1)]
    heap = FreeList(0, max(collectives.symmetric_bytes("all_gather", size) for size in sizes))
    session = types.SimpleNamespace(name="", group=group_of(""))
    open_sessions(monkeypatch, session)
    cache = OpCache(session)

    def take(self, problem, transport, session):
        self.nbytes = problem.nbytes * (1 if transport == "copy_engine" else 2)
        self.offset = heap.allocate(self.nbytes)
        if self.offset is None:
            raise HeapExhausted(f"{self.nbytes} bytes")

    def ours(buffers):
        return buffers.into(
            "result",
            lambda inputs, out: cache.operator(buffers.problem, "ldst", AllGather)(inputs.x, out),
        )

    monkeypatch.setattr(AllGather, "__init__", take)
    monkeypatch.setattr(AllGather, "__call__", lambda self, x, out: out.copy_(x))
    monkeypatch.setattr(AllGather, "free", lambda self: heap.free(self.offset, self.nbytes))
    monkeypatch.setattr(transport, "obstacle_of_ranks", lambda *_: None)
    monkeypatch.setattr(collectives, "op_cache_of", lambda _: cache)
    monkeypatch.setattr(op_cache, "_caches", {"": cache})
    monkeypatch.setitem(collectives.IMPLEMENTATIONS, "ours", ours)
    group, wanted = group_of(""), bench.BenchOptions(sizes=[1], warmups=1, runs=1)
    (whole,) = collectives.cases(AllGather, wanted, 1)
    for size in sizes:
        problem = collectives.problem_of("all_gather", size, torch.bfloat16)
        result, missing = bench.measured(replace(whole, shape=size), problem, group, None, wanted)
        assert list(missing) == ["transport/ll", "exchange/copies"]
        assert result.is_right("ours")
