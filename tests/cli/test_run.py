"""``tileweave run`` runs TileLang scripts for a GPU in the simulator."""

import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tilelang import profiler
from tilelang.carver.arch.driver import get_num_sms

import tileweave as tw
from tests.releases import RECORDS_LINES
from tileweave.cli.main import main
from tileweave.cpu_devices import cuda_is_cpu

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/tilelang_softmax.py"

SCRIPT = """
import sys
import tilelang
import tilelang.language as T
import torch

@tilelang.jit(out_idx=[-1])
def double(n):
    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 32), threads=32) as b:
            for i in T.Parallel(32):
                B[{index}] = A[b * 32 + i] * {factor}
    return kernel

if __name__ == "__main__":
    print(sys.argv[1:], torch.cuda.get_device_capability())
    kernel = double(int(sys.argv[1]))
    profiler = kernel.get_profiler()
    profiler.assert_allclose(lambda a: {reference} * a)
    print("right", profiler.do_bench())
"""

REQUIRED = """
import tilelang.testing as testing

@testing.requires_cuda
@testing.requires_cuda_or_cdna
def test_any(): ...

@testing.requires_cuda_compute_version_ge(9, 0)
def test_from_hopper(): ...

@testing.requires_cuda_compute_version_gt(9, 0)
def test_after_hopper(): ...

def test_second_device():
    import tvm
    assert not tvm.cuda(1).exist and not tvm.rocm(0).exist and tvm.cpu(0).exist
"""


@pytest.fixture
def script(tmp_path):
    def write(**values: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(
            SCRIPT.format(**{"index": "b * 32 + i", "factor": "2", "reference": "2"} | values)
        )
        return str(path)

    return write


@pytest.mark.parametrize(
    ("options", "capability"),
    [([], (9, 0)), (["--level", "device", "--arch", "sm_80"], (8, 0))],
    ids=["tile", "device"],
)
def test_a_script_runs_as_on_a_gpu(script, capsys, options, capability):
    path, before = list(sys.path), list(sys.argv)
    with pytest.warns(UserWarning, match="the simulator measures no time"):
        assert main(["run", *options, script(), "64", "--heads"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-2:] == [f"['64', '--heads'] {capability}", "right nan"]
    level = options[1] if options else "tile"
    assert f"tileweave: simulated calls at the {level} level: kernel x 2\n" in err
    assert (sys.path, sys.argv) == (path, before)


def test_a_fault_ends_the_script_with_its_line(script, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", script(index="i"), "64"])
    out, err = capsys.readouterr()
    assert end.value.code == 1
    assert "script.py: race: store of B[0..31] by rank 0, block " in out
    assert not RECORDS_LINES or "script.py:13" in out
    assert "right" not in out
    assert "kernel x 1" in err


def test_options_of_debugging_are_passed(script, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--nan", script(factor="3e38 * 3e38"), "64"])
    assert re.search(r"script.py: nan: -?inf in B\[0\], made of A ", capsys.readouterr().out)
    with (
        pytest.warns(tw.SimulationWarning, match="1 blocks compute 32 of 64"),
        pytest.raises(AssertionError, match="nan"),
    ):
        main(["run", "--blocks", "1", script(), "64"])


def test_the_debugger_shows_tiles(script, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("p bx\nq\n"))
    options = ["--watch", "bx, bx > 0", "--watch", "none", "--break", "13, bx == 1"]
    assert main(["run", *options, script(), "64"]) == 130 * RECORDS_LINES
    out, err = capsys.readouterr()
    assert "bx = 1: rank 0, block 1 (1) in launch 0 --> " in out
    assert not RECORDS_LINES or f"{script()}(13)<module>()" in out
    assert "tileweave: watch none: no tile or variable none; expected block, bx, i, " in err


@pytest.mark.parametrize("option", ["--watch", "--break"])
def test_the_debugger_needs_the_level_tile(script, capsys, option):
    assert main(["run", option, "13", "--level", "device", script(), "64"]) == 1
    error = f"run: {option} with --level device; expected --level tile"
    assert capsys.readouterr().err.splitlines() == [f"tileweave: {error}"]


def test_other_errors_of_the_script_are_raised(script):
    with pytest.raises(AssertionError):
        main(["run", script(reference="3"), "64"])


def test_a_missing_script_is_named(capsys):
    assert main(["run", "none.py"]) == 1
    assert "run: there is no file none.py; expected a Python file" in capsys.readouterr().err


def test_the_device_cuda_is_the_cpu():
    before = dict(vars(torch.cuda)), torch.set_default_device, profiler.do_bench
    with cuda_is_cpu("sm_80"):
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_properties(0).multi_processor_count == 108
        assert get_num_sms() == 108
        cuda = torch.device("cuda", 0)
        torch.set_default_device("cuda")
        tensors = [
            torch.ones(2, device="cuda"),
            torch.ones(2, device=cuda),
            torch.ones(2, device=torch.cuda.current_device()),
            torch.ones(2, pin_memory=True),
            torch.ones(2).new_empty(2, device="cuda:0").fill_(1),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(cuda, torch.float32),
            torch.ones(2).cuda(non_blocking=True),
            torch.nn.Linear(2, 2).cuda().to("cuda").bias.detach() * 0 + 1,
        ]
        with cuda, torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
            tensors.append(torch.ones(2))
        assert all(torch.equal(t, torch.ones(2)) and t.device.type == "cpu" for t in tensors)
        a = torch.zeros(2)
        for moved in (a.cuda(), a.to("cuda"), a.to(device="cpu"), a.cpu()):
            moved += 1
        assert torch.equal(a, torch.zeros(2))
        assert a.to(torch.float32) is a
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        end.record(torch.cuda.current_stream())
        torch.cuda.synchronize()
        assert math.isnan(start.elapsed_time(end))
        with pytest.warns(UserWarning, match="measures no time"):
            assert len(profiler.do_bench(lambda: None, quantiles=[0.1, 0.5])) == 2
    assert (dict(vars(torch.cuda)), torch.set_default_device, profiler.do_bench) == before


def _python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | environment,
    )  # fmt: skip


def test_the_environment_variable_runs_the_process_in_the_simulator():
    code = f"import tileweave, runpy; runpy.run_path({EXAMPLE!r}, run_name='__main__')"
    end = _python(code, TILEWEAVE_INTERPRET="device")
    assert (end.stdout.splitlines()[-1:], end.returncode) == (["softmax: right"], 0), end.stderr
    end = _python("import tileweave", TILEWEAVE_INTERPRET="warp")
    assert "TILEWEAVE_INTERPRET=warp; expected 1 or tile or device, or 0 for none" in end.stderr


def test_pytest_runs_tests_that_require_a_gpu(tmp_path):
    path = tmp_path / "test_required.py"
    path.write_text(REQUIRED)
    code = f"import pytest; pytest.main(['-q', '-rs', '-p', 'tileweave', {str(path)!r}])"
    end = _python(code, TILEWEAVE_INTERPRET="1")
    assert "3 passed, 1 skipped" in end.stdout
    assert "but have 9.0" in end.stdout


def test_import_without_the_variable_imports_no_simulator():
    code = "import sys, tileweave; print('tileweave.interpreter' in sys.modules)"
    end = _python(code, TILEWEAVE_INTERPRET="0")
    assert end.stdout.splitlines()[-1] == "False", end.stderr
