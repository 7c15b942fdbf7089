"""``tileweave bench --against``: a function of the user beside each operator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.ops import on_ranks
from tileweave.bench.results import load, table
from tileweave.bench.selection import FAMILIES, names_of
from tileweave.cli.main import main

SAME = """
from tileweave import ops

def function(*args, **options):
    return ops.{op}(*args, **options)
"""
CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = {op: family.example.split() for family in FAMILIES for op in names_of(family)}
OTHERS = {"attention": ["--shapes", "4x2x32"], "decode": ["--shapes", "4x2x32"]}


@pytest.fixture
def bench(tmp_path, capsys):
    """Return a function that runs the smallest cases of an operator and returns the results."""

    def run(op: str, text: str):
        file, out = tmp_path / "mine.py", tmp_path / "bench.json"
        file.write_text(text)
        against = ["--against", f"{file}:function", "--runs", "1", "--json", str(out)]
        more = next(OTHERS.get(f.name, []) for f in FAMILIES if op in names_of(f))
        assert main(["bench", op, *EXAMPLES[op], *more, *against]) == 0
        return load(str(out))[1]

    return run


@pytest.mark.parametrize("op", EXAMPLES)
def test_the_function_gets_the_arguments_of_the_operator(op, bench):
    for result in bench(op, SAME.format(op=op)):
        assert result.is_right("against") and result.ms["against"] > 0
        assert result.best_other <= result.ms["against"]
        head, row = table([result])
        assert "against" in head and f"{result.ms['against']:.3f}" in row


def test_the_function_of_the_guide(three, tmp_path):
    page = (CHECKOUT / "docs" / "guides" / "benchmarks.md").read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "mine.py").write_text(text)
    location = re.search(r"--against (mine\.py:\w+)$", page, re.M)[1]
    for errors in three.run(on_ranks.benchmark_against, str(tmp_path / location)):
        assert 0 < errors["against"] < 1e-2


def test_a_wrong_result_is_left_out(bench, capsys):
    text = "def function(a, b):\n    return a @ b * 1.1\n"
    (result,) = bench("matmul_all_reduce", text)
    assert not result.is_right("against") and result.best("against") is None
    assert "against: wrong for matmul_all_reduce 256 x 512 x 512" in capsys.readouterr().out


def test_a_function_that_raises_is_missing(bench, capsys):
    text = "def function(a, b):\n    raise ImportError('no package')\n"
    (result,) = bench("matmul_all_reduce", text)
    assert "against" not in result.ms
    assert "against: -: ImportError: no package" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["all_reduce", "--against", "no.py:f"],
            "bench: --against no.py:f; expected FILE:FUNCTION",
        ),
        (["all_reduce", "--against", f"{__file__}:no"], ":no; expected FILE:FUNCTION"),
        (["all_reduce", "--against", __file__], "expected FILE:FUNCTION"),
        (
            ["moe", "--against", f"{__file__}:bench"],
            "combine, dispatch, expert_mlp, grouped_matmul",
        ),
    ],
)
def test_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err
