"""The command line: output, streams and exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tileweave.cli.main import main

CHECKOUT = Path(__file__).resolve().parents[2]

HEAD = """
import tilelang.language as T
from tileweave import language as W
"""

PROGRAM = """
@T.prim_func
def {name}(S: W.Symmetric((64,), "float32")):
    with T.Kernel(1, threads=64):
        for i in T.Parallel(64):
            S[W.rank(), i] = {value}
"""


@pytest.fixture
def file(tmp_path):
    def write(*programs: str) -> str:
        path = tmp_path / "some-programs.py"
        path.write_text(HEAD + "".join(programs))
        return str(path)

    return write


def test_emit_prints_every_program(file, capsys):
    path = file(PROGRAM.format(name="one", value=1.0), PROGRAM.format(name="two", value=2.0))
    assert main(["emit", path]) == 0
    out = capsys.readouterr().out
    assert out.index("// ==== one") < out.index("one_kernel(") < out.index("// ==== two")
    assert "two_kernel(" in out


def test_emit_prints_one_program_alone(file, capsys):
    path = file(PROGRAM.format(name="one", value=1.0), PROGRAM.format(name="two", value=2.0))
    assert main(["emit", f"{path}:two", "--stage", "tile", "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "====" not in out and "def one(" not in out
    assert "def two(" in out and "(3, 64)" in out


def test_emit_takes_an_alias_once(file, capsys):
    path = file(PROGRAM.format(name="one", value=1.0), "\nsame = one\n")
    assert main(["emit", path, "--stage", "tile"]) == 0
    assert capsys.readouterr().out.count("def one(") == 1


@pytest.mark.parametrize(
    ("programs", "suffix", "options", "message"),
    [
        (("one",), ":two", (), "has no T.prim_func two; expected one"),
        (("one", "two"), ":three", (), "has no T.prim_func three; expected one or two"),
        ((), "", (), "has no T.prim_func; expected one at module level"),
        (("one",), "x", (), "there is no file"),
        (("one",), "", ("--world-size", "0"), "--ranks 0; expected at least 1"),
        (("one",), "", ("--world-size", str(1 << 40)), "; expected at least 1, and at most 1024"),
        (("one",), "", ("--arch", "sm_1"), "arch='sm_1'; expected 'sm_80', 'sm_90a'"),
        (("one",), "", ("--arch", "sm_9999"), "arch='sm_9999'; expected 'sm_80', 'sm_90a'"),
        (("one",), "a" * 300, (), "expected FILE or FILE:NAME"),
        (("one",), "", ("--arch", "hopper"), "arch='hopper'; expected 'sm_80'"),
    ],
)
def test_emit_refuses_in_one_line(file, capsys, programs, suffix, options, message):
    path = file(*(PROGRAM.format(name=name, value=1.0) for name in programs))
    assert main(["emit", path + suffix, *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tileweave: emit: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("command", ["emit", "explain", "simulate", "mutate"])
def test_the_command_names_a_missing_file(command, capsys):
    assert main([command, "missing.py"]) == 1
    assert capsys.readouterr().err.startswith(f"tileweave: {command}: there is no file missing.py")


def test_emit_names_the_line_of_a_wrong_program(file, capsys):
    path = file(
        "\n@T.prim_func\ndef f(F: W.Symmetric((4,), 'uint32')):\n"
        "    with T.Kernel(1, threads=32):\n        W.signal(F[0, 0], scope='node')\n"
    )
    assert main(["emit", path]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"tileweave: signal: scope='node'; expected 'cta' or 'gpu' or 'sys'\n --> {path}:8\n"
    )


def test_emit_without_nvcc(file, capsys, monkeypatch):
    monkeypatch.setattr("tilelang.contrib.nvcc.CUDA_HOME", "/nowhere")
    assert main(["emit", file(PROGRAM.format(name="one", value=1.0)), "--stage", "ptx"]) == 1
    assert "no nvcc in CUDA_HOME=/nowhere; expected one" in capsys.readouterr().err


SIGNALS = """
@T.prim_func
def {name}(F: W.Symmetric((2,), "int32"), epoch: T.int32):
    with T.Kernel(1, threads=32):
        W.signal(F[0, 0])
        if W.rank() == 0:
            W.{wait}
"""
CLEAN = SIGNALS.format(name="clean", wait="wait_reached(F[0, 0], 2)")
STUCK = SIGNALS.format(name="stuck", wait="wait_reached(F[0, 1], 1)")
UNHEARD = SIGNALS.format(name="unheard", wait="signal(F[1, 1])")
ONCE = ["--ranks", "2", "--schedules", "2", "--set", "epoch=0", "--epochs", "1"]


def test_simulate_prints_a_verdict_for_each_program(file, capsys):
    path = file(CLEAN, STUCK, UNHEARD)
    with pytest.raises(SystemExit) as status:
        main(["simulate", path, *ONCE])
    assert status.value.code == 1
    out = capsys.readouterr().out
    assert "clean: 2 schedules of 2 ranks, no fault\n" in out
    assert "stuck: deadlock: no block or stream can continue\n" in out and "replay it with" in out
    assert "unheard: 2 schedules of 2 ranks, no fault\nwarning: unheard: " in out


HINT = "(for 4 ranks, the default; --ranks N sets another number)"


def test_a_fault_names_the_default_number_of_ranks(file, capsys, monkeypatch):
    """Locations below the current folder are relative to it."""
    path = Path(file(STUCK))
    monkeypatch.chdir(path.parent)
    more = ["--schedules", "1", "--set", "epoch=0", "--epochs", "1"]
    for ranks in ([], ["--ranks", "4"]):
        with pytest.raises(SystemExit):
            main(["simulate", str(path), *ranks, *more])
        out = capsys.readouterr().out
        assert out.endswith(f"{HINT}\n") == (not ranks)
        assert f"--> {path.name}:" in out and str(path.parent) not in out


def test_an_error_names_the_default_number_of_ranks(file, capsys, monkeypatch):
    path = Path(file(PROGRAM.format(name="one", value=1.0).replace("W.rank()", "5")))
    monkeypatch.chdir(path.parent)
    for ranks in ([], ["--ranks", "3"]):
        assert main(["explain", str(path), *ranks]) == 1
        err = capsys.readouterr().err
        assert err.endswith(f"{HINT}\n") == (not ranks)
        assert "which has rank index 5; expected 0 to" in err and f"\n --> {path.name}:" in err


def test_simulate_as_json(file, capsys):
    with pytest.raises(SystemExit) as status:
        main(["simulate", file(CLEAN, STUCK, UNHEARD), *ONCE, "--seed", "7", "--json"])
    assert status.value.code == 1
    captured = capsys.readouterr()
    data = {p["name"]: p for p in map(json.loads, captured.out.splitlines())}
    assert captured.err == ""
    same = {"ranks": 2, "schedules": 2, "seed": 7}
    assert data["clean"] == {
        "name": "clean", **same, "verdict": "no fault", "fault": None,
        "inputs": {"F": "zeros at first"}, "warnings": [],
    }  # fmt: skip
    fault = data["stuck"]["fault"]
    assert (data["stuck"]["verdict"], fault["kind"], fault["seed"]) == ("fault", "deadlock", 7)
    assert "waits at W.wait_reached(F[0, 1]): value seen 0" in fault["report"]
    texts = data["unheard"]["warnings"]
    assert len(texts) == 2 and any("F[1, 1] is signalled, but never waited for" in t for t in texts)


def test_simulate_explores_all_interleavings(file, capsys):
    path = file(CLEAN, STUCK)
    assert main(["simulate", f"{path}:clean", *ONCE, "--exhaustive"]) == 0
    all_of_them = "all 2 interleavings of clean for 2 ranks are free of races and deadlocks"
    assert capsys.readouterr().out == f"{all_of_them}\n"
    few = ["--exhaustive", "1", "--json"]
    with pytest.raises(SystemExit) as status:
        main(["simulate", path, *ONCE, *few])
    assert status.value.code == 1
    clean, stuck = map(json.loads, capsys.readouterr().out.splitlines())
    assert (clean["verdict"], clean["interleavings"], clean["complete"]) == ("no fault", 1, False)
    assert clean["summary"].startswith("1 interleavings of clean for 2 ranks explored, not all; ")
    assert (stuck["fault"]["kind"], stuck["fault"]["seed"]) == ("deadlock", None)
    assert stuck["interleavings"] == 1
    with pytest.raises(SystemExit) as status:
        main(["simulate", f"{path}:clean", *ONCE, *few[:2]])
    assert status.value.code == 1
    assert main(["simulate", path, *ONCE, "--exhaustive", "--level", "device"]) == 1
    assert "--exhaustive with --level device; expected --level tile" in capsys.readouterr().err


def test_simulate_draws_a_timeline(file, capsys, tmp_path):
    out = tmp_path / "a.html"
    assert main(["simulate", file(CLEAN), *ONCE, "--json", "--timeline", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "no fault"
    assert "function picture" in out.read_text()


@pytest.mark.parametrize(
    ("programs", "name", "message"),
    [
        ((CLEAN, STUCK), "a.html", "--timeline of clean, stuck; expected one program, FILE:NAME"),
        ((CLEAN,), "a.txt", "expected a name that ends in .html or .json"),
    ],
)
def test_simulate_refuses_a_timeline(file, capsys, tmp_path, programs, name, message):
    where = tmp_path / name
    assert main(["simulate", file(*programs), *ONCE, "--json", "--timeline", str(where)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and not where.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks 0; expected at least 1, and at most 1024"),
        (["--ranks", "1000000"], "--ranks 1000000; expected at least 1, and at most 1024"),
        (["--seed", "-1"], "--seed -1; expected 0 or more"),
        (["--set", "nosuch=3"], "--set nosuch, of clean; expected epoch"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "mutate"])
def test_simulate_refuses_in_one_line(file, capsys, command, options, message):
    assert main([command, file(CLEAN), *options]) == 1
    assert f"{command}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("after", "shown"), [(0, True), (60, False)])
def test_simulate_shows_a_bar_on_a_terminal(file, capsys, monkeypatch, after, shown):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tileweave.simulator.report.progress._SILENT", after)
    monkeypatch.setattr("tileweave.simulator.report.progress._PERIOD", 0)
    assert main(["simulate", file(CLEAN), *ONCE]) == 0
    assert ("clean:   0%" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("arguments", [[], ["emit"], ["emit", "x.py", "--stage", "sass"], ["cure"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert capsys.readouterr().err.startswith("usage: tileweave")


@pytest.mark.parametrize(
    ("option", "instead"),
    [("--size", "--set"), ("--traceback", "TILEWEAVE_TRACEBACK=1"), ("--rows=1", "--sizes")],
)
def test_a_removed_option_names_what_to_use(option, instead, capsys):
    assert main(["emit", "x.py", option]) == 2
    assert capsys.readouterr().err == f"tileweave: {option}: removed; expected {instead}\n"


def test_it_can_be_stopped(file, monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tileweave.cli.emit.emit", stopped)
    assert main(["emit", file(PROGRAM.format(name="one", value="1"))]) == 130
    assert capsys.readouterr().err == "tileweave: stopped\n"


def test_module_runs_and_survives_a_closed_pipe(file):
    path = file(PROGRAM.format(name="one", value=1.0))
    run = subprocess.run(
        f"{sys.executable} -m tileweave emit {path} | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert (run.returncode, run.stderr) == (0, "")


PLANS = """
import tilelang.language as T
import tileweave as tw

@T.prim_func
def step(x: T.Tensor((4,), "int32"), y: T.Tensor((4,), "int32"), epoch: T.int32):
    with T.Kernel(1, threads=32):
        y[0] = x[0] + epoch

@tw.plan
def plan(p, x: T.Tensor((4,), "int32"), y: T.Tensor((4,), "int32"), z: T.Tensor((4,), "int32"),
         epoch: T.int32):
    if epoch > 1:
        p.copy(z, x)
    p.launch(step, x, y, epoch)
"""

BEYOND = """
import tilelang.language as T
import tileweave as tw

@tw.plan
def beyond(p, x: T.Tensor((4,), "int32"), y: T.Tensor((4,), "int32"), epoch: T.int32):
    p.copy(y[epoch : epoch + 3], x[0:3])
"""


def test_simulate_runs_plans_and_no_kernel_of_theirs(tmp_path, capsys):
    path = tmp_path / "plans.py"
    path.write_text(PLANS)
    assert main(["simulate", str(path), "--schedules", "2", "--set", "epoch=epoch"]) == 0
    assert capsys.readouterr().out == "plan: 2 schedules of 4 ranks, no fault\n"


def test_simulate_says_where_a_plan_leaves_a_tensor(tmp_path, capsys):
    path = tmp_path / "beyond.py"
    path.write_text(BEYOND)
    with pytest.raises(SystemExit):
        main(["simulate", str(path), "--set", "epoch=epoch"])
    shown = capsys.readouterr().out
    assert "bounds: y[0:4]: slice 2:5 of axis 0; expected a part of 0:4" in shown
    assert f"{path}:7\nin plan beyond of rank 0 in launch 2" in shown


DYNAMIC = """
import tilelang.language as T
import tileweave as tw
from tileweave import language as W

M = T.dynamic("M")

@T.prim_func
def gather(rows: W.Symmetric((2, M, 32), "float32"), out: T.Tensor((2, M, 32), "float32")):
    with T.Kernel(T.ceildiv(M, 8), 2, threads=32) as (row, source):
        tile = T.alloc_shared((8, 32), "float32")
        T.copy(rows[W.rank(), source, row * 8, 0], tile)
        T.copy(tile, out[source, row * 8, 0])

@tw.plan
def plan(p: tw.PlanBuilder, A: T.Tensor((M, 32), "float32"),
         rows: W.Symmetric((2, M, 32), "float32"), out: T.Tensor((2, M, 32), "float32")):
    for peer in range(2):
        p.copy(rows[peer, p.rank], A)
    p.launch(gather, rows, out)

@T.prim_func
def shift(S: W.Symmetric((M, 32), "float32"), X: T.Tensor((M, 32), "float32"),
          Y: T.Tensor((M, 32), "float32")):
    with T.Kernel(T.ceildiv(M, 8), threads=32) as row:
        tile = T.alloc_shared((8, 32), "float32")
        T.copy(X[row * 8, 0], tile)
        T.copy(tile, S[(W.rank() + 1) % 2, row * 8, 0])
        T.copy(S[W.rank(), row * 8, 0], tile)
        T.copy(tile, Y[row * 8, 0])
"""


@pytest.fixture
def dynamic(tmp_path):
    path = tmp_path / "dynamic.py"
    path.write_text(DYNAMIC)
    return str(path)


def test_sizes_of_dynamic_extents(dynamic, capsys):
    assert main(["simulate", dynamic, "--ranks", "2", "--schedules", "2", "--set", "M=11"]) == 0
    assert capsys.readouterr().out == (
        "plan: 2 schedules of 2 ranks, no fault\nshift: 2 schedules of 2 ranks, no fault\n"
    )
    assert main(["explain", dynamic, "--ranks", "2", "--set", "M=11"]) == 0
    shown = capsys.readouterr().out
    assert "plan, 2 ranks, M=11\n" in shown and "shift, 2 ranks, M=11\n" in shown
    emit = ["emit", f"{dynamic}:shift", "--ranks", "2", "--stage", "tile", "--set", "M=11"]
    assert main(emit) == 0
    assert "S = T.match_buffer(S_handle, (2, 11, 32)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", ":shift"], "shift: no size for M, on which its synchronization depends; "
         "expected sizes={'M': ...} (--set M=... on the command line)"),
        (["emit", ":shift"], "shift: no size for M"),
        (["explain", ":plan"], "explain plan: M of A is dynamic; expected an input that shows its "
         "size, or its size: M=... (--set M=... on the command line)"),
        (["simulate", ":shift"], "simulate: M of S is dynamic; expected an input that shows its "
         "size, or its size: M=... (--set M=... on the command line)"),
        (["explain", ":shift", "--set", "K=3"], "explain: --set K, of shift; expected M"),
        (["emit", ":shift", "--set", "M=0"], "emit: --set M=0; expected NAME=VALUE, a positive "
         "integer"),
        (["mutate", ":shift", "--set", "M"], "mutate: --set M; expected NAME=NUMBER"),
    ],
)  # fmt: skip
def test_sizes_that_are_refused(dynamic, capsys, arguments, message):
    command, name, *options = arguments
    assert main([command, dynamic + name, *options]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1


JITTED = """
import tilelang

@tilelang.jit(out_idx=[-1])
def fill(n, dtype="int32"):
    @T.prim_func
    def filled(B: T.Tensor((n,), dtype)):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(n):
                B[i] = i
    return filled

@tilelang.jit
def negate(A, B):
    n = T.const("n")
    A: T.Tensor((n,), "float32")
    B: T.Tensor((n,), "float32")
    with T.Kernel(1, threads=32):
        for i in T.Parallel(n):
            B[i] = -A[i]
"""


@pytest.mark.parametrize("command", ["simulate", "validate", "emit"])
def test_functions_of_tilelang_jit_have_their_arguments_in_set(file, capsys, command):
    path = file(JITTED)
    few = [] if command == "emit" else ["--schedules", "1"]
    sets = ["--ranks", "1", "--set", "n=64", *few]
    assert main([command, f"{path}:fill", *sets, "--set", "dtype=float32"]) == 0
    assert ("float* __restrict__ B" if command == "emit" else "fill: ") in capsys.readouterr().out
    assert main([command, f"{path}:negate", *sets]) == 0
    capsys.readouterr()
    assert main([command, f"{path}:fill", *few]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(f"tileweave: {command}: fill: missing a required argument: 'n'; exp")


@pytest.mark.parametrize("command", ["simulate", "emit"])
def test_kernels_of_a_file_are_programs(file, capsys, command):
    path = file(JITTED, "\nkernel = fill(32)\n")
    assert main([command, path, "--ranks", "1"]) == 0
    out = capsys.readouterr().out
    assert ("filled_kernel(" if command == "emit" else "kernel: 20 schedules") in out
    assert "====" not in out
