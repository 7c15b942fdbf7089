"""``tileweave trace``: output, files, messages, and the calls that it records."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import tilelang.language as T
import torch

from tileweave import language as W
from tileweave.cli import generated_call
from tileweave.cli.main import main
from tileweave.cli.program_files import load_programs
from tileweave.runtime.plans.parameters import Parameter

PROGRAM = """
import tilelang.language as T
from tileweave import language as W

@T.prim_func
def ring(F: W.Symmetric((1,), "int32"), epoch: T.int32):
    with T.Kernel(1, threads=32):
        W.signal(F[(W.rank() + 1) % W.world_size(), 0])
        W.wait_reached(F[W.rank(), 0], epoch + 1)
"""


@pytest.fixture
def run_file(tmp_path, capsys):
    program, out = tmp_path / "ring.py", tmp_path / "run.json"
    program.write_text(PROGRAM)
    options = ["--ranks", "3", "--set", "epoch=epoch", "--schedules", "1", "--timeline", str(out)]
    assert main(["simulate", str(program), *options]) == 0
    capsys.readouterr()
    return out


def test_the_summary_is_the_default(run_file, capsys):
    assert main(["trace", str(run_file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ring: 3 ranks, seed 0, no fault, ") and "critical path" in text
    assert text.count("waiting for F at ring.py:9") == 3


def test_json(run_file, capsys):
    assert main(["trace", str(run_file), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["unit"], summary["fault"]) == ("steps", None)
    for share in summary["shares"]:
        parts = share["computing"] + share["waiting"] + share["publishing"]
        assert parts == pytest.approx(share["total"]) and share["computing"] > 0


def test_a_drawing(run_file, capsys, tmp_path):
    page = tmp_path / "run.html"
    assert main(["trace", str(run_file), "--timeline", str(page)]) == 0
    assert "function picture" in page.read_text()
    assert "critical path" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{}", [], "expected a trace that `tileweave simulate --timeline X.json` or tw.trace"),
        (None, [], "No such file or directory; expected a readable file"),
        ("{}", ["--timeline", "a.pdf"], "trace: --timeline a.pdf; expected a name that ends in"),
    ],
)
def test_refuses_in_one_line(tmp_path, capsys, content, options, message):
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    assert main(["trace", str(file), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.py"], "trace: there is no file missing.py; expected FILE or FILE:NAME"),
        (["ring.py", "--out", "a.html"], "trace: --out a.html; expected a name that ends in .json"),
        (["ring.py", "--set", "steps=3"], "trace: --set steps, of ring; expected epoch"),
        (["two.py"], "trace: ring, again of two.py; expected one program, FILE:NAME"),
    ],
)
def test_refuses_to_record(tmp_path, capsys, monkeypatch, options, message):
    (tmp_path / "ring.py").write_text(PROGRAM)
    again = PROGRAM + "\n\n" + PROGRAM.partition("\n\n")[2].replace("def ring", "def again")
    (tmp_path / "two.py").write_text(again)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_arguments_of_a_recorded_call(monkeypatch):
    memory = {}

    def allocate(shape, dtype):
        memory["S"] = SimpleNamespace(local=torch.empty(shape, dtype=dtype))
        return memory["S"]

    monkeypatch.setattr(generated_call, "symmetric", allocate)
    device = torch.device("cpu")
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    tensor = Parameter.of("A", T.Tensor((2, 3), "bfloat16"))
    made = generated_call.argument(tensor, (2, 3), values, device)
    assert made.dtype == torch.bfloat16 and made.tolist() == [[0, 1, 2], [3, 4, 5]]
    empty = generated_call.argument(tensor, (2, 3), None, device)
    assert empty.tolist() == [[0] * 3] * 2
    shared = Parameter.of("S", W.Symmetric((2,), "uint32"))
    found = generated_call.argument(shared, (2,), np.array([7, 8], np.uint32), device)
    assert found is memory["S"] and found.local.tolist() == [7, 8]


def test_a_recorded_call(monkeypatch, tmp_path):
    calls = []
    (tmp_path / "ring.py").write_text(PROGRAM)
    options = SimpleNamespace(
        command="trace", program=str(tmp_path / "ring.py"), seed=0, json=False
    )
    (program,) = load_programs(options).values()
    monkeypatch.setattr(generated_call, "symmetric", lambda shape, dtype: SimpleNamespace(
        local=torch.empty(shape, dtype=dtype)))  # fmt: skip
    monkeypatch.setattr(generated_call, "compile", lambda func: lambda *args: calls.append(args))
    group = SimpleNamespace(
        world_size=3, rank=1, device=torch.device("cpu"), synchronize=lambda: None,
        meet=lambda topic: None,
    )  # fmt: skip
    session = SimpleNamespace(group=group)
    scalars = {"epoch": lambda epoch: epoch}
    call = generated_call.GeneratedCall("ring", program, session, scalars, options)
    for launch in range(2):
        call(launch)
    assert [args[1] for args in calls] == [0, 1]
    assert calls[0][0].local.tolist() == [0]
