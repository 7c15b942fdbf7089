"""Inputs of commands: the function ``inputs(ranks, rng)`` of a file, else invented ones."""

import json
import re
from pathlib import Path

import pytest

from tileweave.cli.main import main

CHECKOUT = Path(__file__).resolve().parents[2]
DISPATCH = CHECKOUT / "examples" / "tutorial" / "07_dispatch.py"
FILES = [
    *sorted((CHECKOUT / "examples" / "patterns").glob("*.py")),
    *(f for f in sorted(DISPATCH.parent.glob("*.py")) if f.stem[:2] not in ("04", "06")),
    *(CHECKOUT / "examples" / f"{name}.py" for name in ("all_gather_gemm", "signal_ping_pong")),
]
"""Files with right programs. Step 4 of the tutorial has a fault, and step 6 has no program."""
INPUTS = re.search(r"^def inputs\(.*?(?=^\S)", DISPATCH.read_text(), re.M | re.S)[0]
SCALE = """\
import numpy as np
import tilelang.language as T

N = T.dynamic("N")


@T.prim_func
def scale(X: T.Tensor((N,), "float32"), Y: T.Tensor((N,), "float32"), factor: T.int32):
    with T.Kernel(1, threads=32) as _:
        for i in T.serial(N):
            Y[i] = X[i] * factor


"""


def _status(command: list[str]) -> int:
    try:
        return main(command)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_examples_have_the_inputs_that_their_contracts_need(file, capsys):
    ranks = ["--ranks", "2"] if file.stem == "signal_ping_pong" else []
    assert _status(["simulate", str(file), "--schedules", "1", "--epochs", "2", *ranks]) == 0
    assert ", no fault\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "mutate"])
def test_every_command_uses_the_function_of_the_file(command, capsys):
    options = ["--schedules", "1", "--json"]
    status = _status([command, str(DISPATCH), *options])
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["fault"] is None and status == (command == "mutate" and outcome["unaccounted"])
    assert outcome["inputs"]["counts"] == "values of inputs(ranks, rng)"
    assert outcome["inputs"]["received"] == "zeros at first"  # the function has no value for it


@pytest.mark.parametrize("command", ["simulate", "validate", "mutate"])
def test_the_report_of_a_fault_says_which_inputs_were_invented(command, tmp_path, capsys):
    text = DISPATCH.read_text()
    assert text.count(INPUTS) == 1
    (tmp_path / "dispatch.py").write_text(text.replace(INPUTS, ""))
    assert _status([command, str(tmp_path / "dispatch.py"), "--ranks", "4"]) == 1
    captured = capsys.readouterr()
    assert captured.out.endswith(
        "\n(invented inputs: random numbers in tokens; zeros in expert, counts; random integers "
        "0 to 7 in row; if the program needs others, its file may have a function "
        "inputs(ranks, rng))\n"
    )
    assert f"{command}: dispatch: inputs: random numbers in tokens" in captured.err


def test_the_report_of_a_fault_is_silent_about_inputs_of_the_file(tmp_path, capsys):
    wrong = DISPATCH.read_text().replace("counts[rank, e])", "counts[rank, e] + 1)")
    (tmp_path / "dispatch.py").write_text(wrong)
    assert _status(["simulate", str(tmp_path / "dispatch.py")]) == 1
    out = capsys.readouterr().out
    assert "dispatch: arrival:" in out and "invented" not in out


@pytest.mark.parametrize(
    ("function", "options", "printed"),
    [
        ("def inputs(ranks, rng, N=4):\n    return [{'X': np.ones(N, 'float32'), 'factor': 2}]",
         ["--set", "N=8"], "scale: 1 schedules of 1 ranks, no fault"),
        ("def inputs(ranks, rng):\n    return [{'X': np.ones(4, 'float32'), 'other': 2}] * ranks",
         ["--set", "factor=3"], "scale: 1 schedules of 1 ranks, no fault\n"
         "simulate: scale: inputs: values of inputs(ranks, rng) in X; ignored: other\n"),
        ("inputs = []", ["--set", "N=8", "--set", "factor=3"], "no fault"),
        ("def inputs(M, N, K):\n    pass", [],
         "simulate: inputs(M, N, K): missing a required argument: 'K'; expected inputs(ranks, rng)"
         ", and sizes of dynamic extents (--set NAME=VALUE) --> scale.py:14"),
        ("def inputs(ranks, rng, N):\n    return [{'X': np.ones(N, 'float32'), 'factor': 2}]",
         ["--set", "N=8"], "scale: 1 schedules of 1 ranks, no fault"),
        ("def inputs():\n    return []", [], "inputs(): too many positional arguments; expected"),
        ("def inputs(ranks, rng):\n    return [{}, {}]", [],
         "simulate: inputs(1, rng) returned 2 dicts; expected a list with one dict per rank, "
         "1 in all --> scale.py:14"),
        ("def inputs(ranks, rng):\n    return {}", [], "inputs(1, rng) returned a dict; expected"),
        ("def inputs(ranks, rng):\n    return [{'X': np.ones(4)}]", ["--set", "factor=3"],
         "simulate: X of rank 0 is float64 (4,); expected float32 (4,)"),
    ],
)  # fmt: skip
def test_function(function, options, printed, tmp_path, monkeypatch, capsys):
    (tmp_path / "scale.py").write_text(f"{SCALE}{function}\n")
    monkeypatch.chdir(tmp_path)
    status = _status(["simulate", "scale.py", "--ranks", "1", "--schedules", "1", *options])
    captured = capsys.readouterr()
    assert printed in captured.out + captured.err
    assert status == ("no fault" not in printed)
