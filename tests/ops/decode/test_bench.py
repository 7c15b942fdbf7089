"""``tileweave bench decode``: shapes, other implementations, and results."""

from __future__ import annotations

import pytest
import torch
from tilelang import tvm

import tileweave as tw
from tests.ops.decode import bench_on_ranks
from tileweave import ops
from tileweave.bench import command as bench
from tileweave.bench import decode, results
from tileweave.bench.results import DecodeShape, load
from tileweave.cli.main import main
from tileweave.ops.core.registry import operators_of

(OPERATOR,) = operators_of(decode.FAMILY.base).values()
NAME = OPERATOR.op
OPTIONS = "--sizes 192,20 --batch 2 --shapes 4x2x32".split()


def test_default_shapes():
    shapes = [str(case.shape) for case in bench.BenchOptions(["decode"]).cases()]
    batches, keys = (1, 16, 64), (4096, 32768, 131072)
    assert shapes == [f"{batch} x {n}" for batch in batches for n in keys]


@pytest.mark.parametrize(
    ("arguments", "shapes"),
    [
        (["decode", "--sizes", "64"], [DecodeShape(b, 64, 32, 8, 128, 64, 1) for b in (1, 16, 64)]),
        (
            [NAME, "--batch", "4,8", "--sizes", "64"],
            [DecodeShape(b, 64, 32, 8, 128, 64, 1) for b in (4, 8)],
        ),
        (["decode", *OPTIONS], [DecodeShape(2, keys, 4, 2, 32, 64, 1) for keys in (192, 20)]),
    ],
)
def test_options(arguments, shapes, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run", lambda wanted: seen.append(wanted) or True)
    assert main(["bench", *arguments]) == 0
    assert [(case.op, case.shape) for case in seen[0].cases()] == [(NAME, s) for s in shapes]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--sizes", "64", "--shapes", "6x4x128"], "expected a number that divides"),
        (["decode", "--shapes", "6x4"], "--shapes 6x4; expected HEADSxKV_HEADSxHEAD_DIM"),
        (
            ["decode", "--sizes", "100"],
            "2 x 100: 100 tokens of a sequence; expected a multiple",
        ),
        (["decode", "--figure", "decode.png"], "bench: --figure decode.png of decode_attention;"),
        (["decode", "--batch", "64"], "takes 3.4e+10 operations, and torch sees no GPU; expected"),
    ],
)
def test_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("measured"))
    batch = [] if "--batch" in arguments else ["--batch", "2"]
    assert main(["bench", *arguments, *batch]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_and_programs(ranks):
    """Each rank has its part of the tokens, and the program of that part."""
    shape = DecodeShape(3, 512, 8, 2, 64, 16, ranks)
    problem = decode.problem_of(NAME, shape, ranks, torch.bfloat16)
    (program,) = decode.programs(problem, None)
    cache = 3 * 512 // ranks * 2 * 64
    assert isinstance(program, tvm.tirx.PrimFunc)
    assert problem.pages * problem.page_size * 2 * 64 == cache
    assert shape.moved_bytes == 2 * 2 * cache
    assert decode.device_bytes(shape) == 2 * 2 * 2 * cache + 2 * 4 * cache // 3


def test_sizes_without_a_program():
    problem = decode.problem_of(NAME, DecodeShape(1, 64, 4, 2, 32, 16, 1), 1, torch.bfloat16)
    assert decode.programs(problem, None) == []


def run(*arguments):
    return main(["bench", *arguments, *OPTIONS, "--runs", "2"])


def test_one_process(tmp_path, capsys):
    file = str(tmp_path / "decode.json")
    assert run("decode", "--json", file) == 0
    out = capsys.readouterr().out
    assert "-: 20 tokens of a sequence; expected a multiple of 64 for 1 ranks and pages of" in out
    _, (measured,) = load(file)
    assert set(measured.ms) == {"ours", "sdpa/flash"}
    assert all(0 < error < 1e-2 for error in measured.errors.values())
    assert main(["bench", "--from", file]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["operator", "batch", "x", "tokens"]
    assert row.split()[:4] == [NAME, "2", "x", "192"]


def test_one_wrong_head(monkeypatch, capsys):
    right = getattr(ops, NAME)

    def wrong(*args, **options):
        result = right(*args, **options)
        result[1, 3] *= 1.1
        return result

    monkeypatch.setattr(ops, NAME, wrong)
    with pytest.raises(SystemExit, match="1"):
        run("decode")
    assert "WRONG" in capsys.readouterr().out


def test_rates():
    ms = {"ours": 0.5, "sdpa/flash": 2.0, "sdpa/cudnn": 1.0}
    shape = DecodeShape(16, 4096, 32, 8, 128, 64, 2)
    r = results.Result(NAME, shape, "fused", "asked for", ms, dict.fromkeys(ms, 0.0), 1)
    nbytes = 16 * 2048 * 8 * 128 * 2 * 2
    assert r.gigabytes("ours") == pytest.approx(nbytes / 0.5e-3 / 1e9)
    _, row = results.table([r])
    assert row.split()[4:10] == ["0.5000", "1.0000", "268", "134", "-", "2.000"]


def test_decode_is_not_tuned():
    with pytest.raises(tw.TileWeaveError, match="tune: decode; expected all_gather_matmul"):
        bench.BenchOptions(["decode"], command="tune").cases()


@pytest.mark.long
def test_three_ranks(three, tmp_path):
    file = tmp_path / "decode.json"
    (right, table), *others = three.run(bench_on_ranks.benchmark, str(file))
    assert (right, others) == (True, [(True, "")] * 2)
    _, measured = load(str(file))
    assert [str(r.shape) for r in measured] == ["1 x 384", "3 x 384"]
    for r in measured:
        assert set(r.ms) == {"ours", "sdpa/flash"}
        assert r.is_right("ours") and r.is_right("sdpa/flash")
    assert table.count("128 tokens of a sequence; expected a multiple of 192 for 3 ranks") == 2
