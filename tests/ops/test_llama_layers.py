"""benchmarks/llama_layers.py: sizes, tables and faults; the whole benchmark on CPUs."""

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import llama_layers

FILE = Path(llama_layers.__file__)
MODE = {"first": 1.0, "forward": 2.0, "both": 3.0, "error": 1e-3, "kernels": 4, "calls": 8}
SIZES = [
    {"asked": 64, "size": 64, "first": 1.0, "compiled": 4, "fused": 4, "error": 1e-3},
    {"asked": 63, "size": 62, "first": 0.1, "compiled": 0, "fused": 4, "error": 1e-3},
]
RUNS = {"cold": {"mode": MODE}, "warm": {"mode": MODE, "sizes": SIZES}}


@pytest.fixture
def faults():
    """Return a function that prints the tables of TileWeave, with a value changed, and returns the
    faults."""

    def print_tables(place: tuple, value: float) -> list[str]:
        runs = copy.deepcopy(RUNS)
        *path, last = place
        row = runs["warm"]
        for key in path:
            row = row[key]
        row[last] = value
        options = SimpleNamespace(ranks=2, layers=1, rows=64)
        return llama_layers.print_tables(options, {"tileweave": runs})

    return print_tables


@pytest.mark.parametrize(
    ("rows", "ranks", "divisible"), [(8192, 2, 8192), (8191, 2, 8190), (777, 8, 776), (1, 8, 8)]
)
def test_sizes_are_multiples_of_the_ranks(rows, ranks, divisible):
    assert llama_layers.divisible(rows, ranks) == divisible


def test_the_first_size_may_compile_kernels(faults, capsys):
    assert faults(("sizes", 0, "compiled"), 9) == []
    out = capsys.readouterr().out
    assert "| tileweave | 1.0 | 1.0 | 2.000 | 3.000 | 1.0e-03 | 4 | 8 |" in out
    assert "| 63 | 62 | 0.100 | 0 | 4 | 1.0e-03 |" in out


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (("mode", "error"), 0.1, "tileweave: relative error 1.0e-01; expected at most 0.05"),
        (
            ("mode", "calls"), 0,
            "tileweave: 0 calls of its operators; expected Inductor to call them",
        ),
        (("sizes", 1, "compiled"), 2, "62 rows: 2 kernels compiled; expected 0"),
        (
            ("sizes", 0, "error"), float("inf"),
            "64 rows: relative error inf; expected at most 0.05",
        ),
    ],
)  # fmt: skip
def test_faults(place, value, fault, faults):
    assert faults(place, value) == [fault]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--rows", "63", "--ranks", "2"], {}, "rows=63; expected a multiple of the 2 ranks"),
        ([], {"RANK": "0"}, "started by torchrun; expected python"),
    ],
)
def test_refused(arguments, environment, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["llama_layers.py", *arguments])
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as error:
        llama_layers.main()
    assert message in str(error.value) + capsys.readouterr().err


def test_arguments_are_parsed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["llama_layers.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        llama_layers.main()
    assert "python benchmarks/llama_layers.py" in capsys.readouterr().out


@pytest.mark.long
def test_inductor_calls_the_operators_on_cpus():
    run = subprocess.run(
        [sys.executable, FILE, "--modes", "tileweave"], capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (row,) = [line for line in run.stdout.splitlines() if line.startswith("| tileweave |")]
    assert row.endswith(" | 0 | 8 |")  # no kernels on CPUs; two operators in each half of a layer
    assert "\n| 63 | 62 | " in run.stdout and "\n| 1 | 2 | " in run.stdout


def rows_of(name: str) -> list[list[str]]:
    """Return the rows of the table that another benchmark of layers prints on two CPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = FILE.with_name(name)
    run = subprocess.run([*command, program], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if line[:2] == "| "]
    return lines[2:]


@pytest.mark.long
def test_models_fuse_each_part_on_cpus():
    fused = {part: int(count) for part, *_, count, _ in rows_of("models.py")}
    assert fused == {"prefill": 4, "train": 8, "decode": 2}


@pytest.mark.long
def test_layers_of_qwen3_on_cpus():
    ((tokens, *times, _, error),) = rows_of("qwen3_layer.py")
    assert tokens == "8" and len(times) == 3
    assert float(error) < 1e-5
