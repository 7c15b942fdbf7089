"""``tileweave bench moe``: shapes, routings, the bytes and operations of a rank, and results."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.ops import on_ranks
from tileweave import ops
from tileweave.bench import command as bench
from tileweave.bench import moe, moe_shapes, results
from tileweave.bench.moe_shapes import (
    MODELS,
    ROUTINGS,
    Model,
    Work,
    choices_of,
    load_of,
    shapes_of,
)
from tileweave.bench.results import load
from tileweave.cli.main import main
from tileweave.ops.core.registry import operators_of

SMALL = Model(12, 3, 64, 32)
SMALL_NAME = "12x3x64x32"
WORKS = (Work(1, 0), moe.GATE_UP, moe.DOWN, Work(2, 3))
NAMES = [cls.op for cls in moe.WORK]


def test_models():
    """Numbers of the configurations that the models' authors published."""
    assert MODELS == {
        "deepseek-v3": (256, 8, 7168, 2048),
        "qwen3-235b": (128, 8, 4096, 1536),
        "mixtral-8x7b": (8, 2, 4096, 14336),
        "mixtral-8x22b": (8, 2, 6144, 16384),
        "gpt-oss-120b": (128, 4, 2880, 2880),
    }


def test_default_shapes():
    shapes = [str(shape) for shape in shapes_of(bench.BenchOptions(sizes=(1, 2)), 2, Work(1, 0))]
    models = "deepseek-v3", "qwen3-235b", "mixtral-8x7b", "gpt-oss-120b"
    assert shapes == [f"{model} {tokens} uniform" for model in models for tokens in (1, 2)]
    tokens = [
        shape.tokens
        for shape in shapes_of(bench.BenchOptions(shapes=["mixtral-8x7b"]), 1, Work(1, 0))
    ]
    assert tokens == [1, 16, 128, 1024, 4096, 8192]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_are_legal_and_repeat(routing):
    choices = choices_of(SMALL, 40, routing, 3, 0)
    assert choices.shape == (3, 40, 3) and 0 <= choices.min() and choices.max() < 12
    assert all(len(set(token)) == 3 for token in choices.flatten(0, 1).tolist())
    choices_of.cache_clear()
    assert torch.equal(choices, choices_of(SMALL, 40, routing, 3, 0))
    assert not torch.equal(choices, choices_of(SMALL, 40, routing, 3, 1))


def counts_of(routing):
    return choices_of(Model(16, 2, 64, 32), 4000, routing, 1, 0).flatten().bincount(minlength=16)


def test_uniform():
    assert (counts_of("uniform").float() / 500 - 1).abs().max() < 0.2


def test_zipf():
    """First choices are in proportion to 1 / i; second ones are less unequal."""
    first = choices_of(Model(16, 2, 64, 32), 20000, "zipf", 1, 0)[..., 0].flatten()
    counts = first.bincount(minlength=16).sort(descending=True).values / 20000
    expected = 1 / torch.arange(1, 17)
    assert (counts / (expected / expected.sum()) - 1).abs().max() < 0.2


def test_one_hot_expert():
    counts = counts_of("hot").sort(descending=True).values
    assert counts[0] == 4000
    assert (counts[1:].float() / (4000 / 15) - 1).abs().max() < 0.25


@pytest.mark.parametrize(("routing", "ranks"), [*product(ROUTINGS, [1, 2, 4])])
def test_load_by_counting(routing, ranks):
    choices = choices_of(SMALL, 7, routing, ranks, 0)
    rows, sent, received = [0] * ranks, [0] * ranks, [0] * ranks
    for source in range(ranks):
        for expert in choices[source].flatten().tolist():
            owner = expert // (12 // ranks)
            rows[owner] += 1
            if owner != source:
                sent[source] += 1
                received[owner] += 1
    assert load_of(SMALL, 7, routing, ranks, 0) == (max(rows), max(sent + received))


def test_bytes_and_operations():
    loads = [load_of(SMALL, 7, "hot", 2, number) for number in range(moe_shapes.SETS)]
    rows, remote = max(load.rows for load in loads), max(load.remote_rows for load in loads)
    wanted = bench.BenchOptions(["moe"], (SMALL_NAME,), (7,), routings=("hot",))
    for ranks in (2, 1):
        shapes = {
            f"{op} {work.part}": shape
            for op, cls in operators_of(tuple(moe.WORK)).items()
            for work, shape in zip(
                moe.WORK[cls], [c.shape for c in moe.cases(cls, wanted, ranks)], strict=True
            )
        }
        sent = {name: shape.sent_bytes for name, shape in shapes.items() if shape.sent_bytes}
        row = remote * 64 * 2
        assert sent == ({"combine ": row, "dispatch ": row, "expert_mlp ": 2 * row}, {})[ranks == 1]
    shapes = {str(work): moe_shapes.shape_of(SMALL_NAME, 7, "hot", 2, work) for work in WORKS}
    assert {shape.rows for shape in shapes.values()} == {rows}
    product = 2 * rows * 64 * 32
    assert [shape.flops for shape in shapes.values()] == [0, 2 * product, product, 3 * product]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt-5"], "bench: --shapes gpt-5; expected deepseek-v3, qwen3-235b, mixtral"),
        (["--shapes", "8x2x64"], "or EXPERTSxTOP_KxHIDDENxINTERMEDIATE"),
        (["--shapes", "8x0x64x32"], "bench: --shapes 8x0x64x32; expected"),
        (["--shapes", "4x5x64x32"], "4x5x64x32: a token chooses 5 experts; expected at most 4"),
        (["--sizes", "0"], "bench: --sizes 0; expected a positive integer"),
        (["--routing", "fair"], "bench: --routing fair; expected uniform, zipf, hot"),
        (["--figure", "moe.png"], "of combine, dispatch, expert_mlp, grouped_matmul; expected one"),
        ([], "deepseek-v3 1 uniform takes 1.1e+10 operations, and torch sees no GPU; expected a"),
    ],
)
def test_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "join", lambda cases: pytest.fail("measured"))
    assert main(["bench", "moe", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_ranks_share_the_experts(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert main(["bench", "moe", "--shapes", SMALL_NAME]) == 1
    message = "has 12 experts; expected a multiple of 5 for 5 ranks"
    assert message in capsys.readouterr().err


def test_ranks_that_cannot_share_the_experts():
    wanted = bench.BenchOptions(["moe"], (SMALL_NAME, "8x2x64x32"), (5,))
    assert {case.obstacle for case in wanted.cases()} == {None}
    cases = moe.cases(operators_of(tuple(moe.WORK))["dispatch"], wanted, 3)
    message = "8x2x64x32 has 8 experts; expected a multiple of 3 for 3 ranks"
    assert [case.obstacle for case in cases] == [None, message]
    _, row = results.table(cases[1:])
    assert row.split() == ["dispatch", "8x2x64x32", "5", "uniform", "-:", *message.split()]


def test_weights_that_do_not_fit():
    cases = bench.BenchOptions(["dispatch", "expert_mlp"], ["mixtral-8x7b"], [1]).cases()
    small, large = bench._fitting(cases, 2 << 30)
    assert small.obstacle is None
    assert large.obstacle == (
        "operands and expected results have 2.6 GiB; expected at most 2.0 GiB, the free memory of "
        "a rank"
    )


def run(*arguments):
    options = "--shapes", SMALL_NAME, "--sizes", "5", "--runs", "1"
    return main(["bench", *arguments, *options])


def test_one_process(tmp_path, capsys):
    file = str(tmp_path / "moe.json")
    assert run("moe", "--routing", "uniform,hot", "--json", file) == 0
    out = capsys.readouterr().out
    names = [line.split()[0] for line in out.splitlines() if "expected cuda" in line]
    assert names == ["combine"] * 2 + ["dispatch"] * 2 + ["expert_mlp"] * 2 + ["grouped_matmul"] * 4
    _, measured = load(file)
    assert all(set(r.ms) == {"ours", "torch"} for r in measured)
    assert all(r.is_right(name) for r in measured for name in r.ms)
    assert {r.shape.part for r in measured} == {"", "gate_up", "down"}
    assert main(["bench", "--from", file]) == 0
    again = capsys.readouterr().out
    assert [line.split()[:4] for line in again.splitlines() if "expected cuda" in line] == [
        line.split()[:4] for line in out.splitlines() if "expected cuda" in line
    ]


@pytest.mark.parametrize("op", NAMES)
def test_one_wrong_row(op, monkeypatch, capsys):
    right = getattr(ops, op)

    def wrong(*args, **options):
        result = right(*args, **options)
        rows = result[0] if op == "dispatch" else result
        rows[1] = rows[1] * 1.1
        return result

    monkeypatch.setattr(ops, op, wrong)
    with pytest.raises(SystemExit, match="1"):
        run(op)
    assert "WRONG" in capsys.readouterr().out


def test_rows_of_no_expert_are_right():
    """A rank whose experts have no token has an empty result, or one of zeros."""
    assert moe.row_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
    assert moe.row_error(torch.zeros(2, 4), torch.zeros(2, 4)) == 0
    assert moe.row_error(torch.ones(2, 4), torch.zeros(2, 4)) > 1
    assert moe.row_error(torch.full((2, 4), torch.nan), torch.ones(2, 4)).isnan()


@pytest.mark.long
def test_three_ranks(three, tmp_path):
    file = tmp_path / "moe.json"
    (right, table), *others = three.run(on_ranks.benchmark_of_mixtures, str(file), SMALL_NAME)
    assert (right, others) == (True, [(True, "")] * 2)
    _, measured = load(str(file))
    assert {(r.op, r.shape.routing) for r in measured} == set(product(NAMES, ROUTINGS))
    for r in measured:
        assert r.is_right("ours") and r.is_right("torch")
        assert (r.gigabytes("ours") is None) == (r.op == "grouped_matmul")
    assert table.count("8x2x64x32 has 8 experts; expected a multiple of 3 for 3 ranks") == 30
