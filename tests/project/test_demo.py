"""``tileweave demo``, with and without GPUs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import tileweave as tw
from tests.modules import load_module
from tileweave.cli import demo
from tileweave.cli.doctor import Nvcc
from tileweave.cli.main import main
from tileweave.simulator.mutation import changed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
README = (EXAMPLES.parent / "README.md").read_text()
NO_NVCC = Nvcc("", "not on PATH, and CUDA_HOME is not set")


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)


@pytest.fixture
def program(monkeypatch):
    """Return the module of the program, which the demo then uses.

    tests/simulator/test_examples.py runs its ``simulated``.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    module = load_module(EXAMPLES / "gemm_reduce_scatter.py")
    monkeypatch.setitem(sys.modules, "gemm_reduce_scatter", module)
    yield module
    sys.modules.pop("without_gpu", None)


def test_without_a_gpu(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "simulated", lambda: True)
    out = tmp_path / "new" / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for command in (["init", "-q"], ["status", "--porcelain"]):
        git = subprocess.run(["git", *command], cwd=tmp_path, capture_output=True, text=True)
        assert (git.returncode, git.stdout) == (0, "")  # a checkout has no untracked file
    assert "deadlock: no block or stream can continue\n" in text
    assert "waits at W.wait_reached(arrived[" in text and "    3 missing\n" in text
    shown = re.search(r"^\$ tileweave demo\n(.*?)^  \.\.\.$", README, re.M | re.S)[1]
    printed = text.replace(f"{EXAMPLES.parent}/", "").replace(str(out), "tileweave-demo")
    printed = _without_numbers(printed).splitlines()
    missing = [line for line in _without_numbers(shown).splitlines() if line not in printed]
    assert [line for line in missing if "interleavings of" not in line] == []
    assert ".version" in (out / "gemm_reduce_scatter.ptx").read_text()
    for name in ("gemm_reduce_scatter.html", "gemm_reduce_scatter_without_signal.html"):
        assert str(out / name) in text
        assert "function picture" in (out / name).read_text()


def test_without_nvcc_and_with_a_wrong_result(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_nvcc", lambda: NO_NVCC)
    monkeypatch.setattr(program, "simulated", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["demo", "--out", str(tmp_path)])
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "demo: NOT COMPILED TO PTX: there is no nvcc" in out
    assert out.endswith("\nwrong: relative error above 1e-2\n")
    assert "tl::tma_store" in (tmp_path / "gemm_reduce_scatter.cu").read_text()


def test_a_folder_that_cannot_be_created(program, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--out", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == (
        f"tileweave: demo: --out {tmp_path / 'file'}: File exists; "
        "expected a folder that can be written\n"
    )


@pytest.mark.parametrize("status", [0, 3])
def test_on_gpus(monkeypatch, capsys, status):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(demo, "find_nvcc", lambda: Nvcc("/cuda/bin/nvcc", "13.0.88"))
    monkeypatch.setattr(subprocess, "run", run)
    if status:
        with pytest.raises(SystemExit, match="1"):
            main(["demo"])
    else:
        assert main(["demo"]) == 0
    assert "GEMM + reduce-scatter on 2 GPUs, checked against torch" in capsys.readouterr().out
    ((python, dash_m, torchrun, *arguments),) = commands
    assert (python, dash_m, torchrun) == (sys.executable, "-m", "torch.distributed.run")
    options = get_args_parser().parse_args(arguments)
    assert options.standalone and options.nproc_per_node == "2" and options.module
    found = importlib.util.find_spec(options.training_script)
    assert Path(found.origin) == EXAMPLES / "gemm_reduce_scatter.py"
    assert options.training_script_args == ["--shape", "2048", "8192", "14336"]


def test_gpus_without_nvcc(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(demo, "find_nvcc", lambda: NO_NVCC)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == (
        "tileweave: demo: no nvcc; expected one on PATH or in CUDA_HOME\n"
    )


def test_an_unknown_change(program):
    small = program.gemm_reduce_scatter(64, 32, 32, 2, 32, 32, 32)
    with pytest.raises(tw.TileWeaveError, match=r"'signal lost'; expected .*signal drop or "):
        changed(small, 2, "signal lost")
