"""Long simulations print an estimate of their time, and are refused if it is too long."""

import pytest
import tilelang.language as T

import tileweave as tw
from tests.cli.test_cli import HEAD
from tileweave.cli.main import main
from tileweave.simulator.report.progress import Progress

PROGRAM = """
@T.prim_func
def many(X: T.Tensor((64,), "int32")):
    with T.Kernel(64, threads=32) as block:
        X[block] = block
"""


class Blocks:
    """A machine that has run some of its blocks."""

    def __init__(self):
        self.counts = 0, 0, 0

    def block_counts(self):
        return self.counts


@pytest.fixture
def clock():
    times = [0.0]

    def now():
        return times[0]

    now.set = lambda t: times.__setitem__(0, t)
    return now


def test_estimate(clock, capsys):
    progress, machine = Progress("gemm", 10, True, clock=clock), Blocks()
    with progress.schedule(machine):
        for seconds, counts in ((4, (1, 1, 100)), (6, (1, 2, 100)), (7, (2, 2, 100))):
            clock.set(seconds)
            machine.counts = counts
            machine.watch()
    assert capsys.readouterr().err == (
        "simulate: gemm: estimated 33 min or more for 10 schedules\n"
    )


def test_limit(clock):
    progress, machine = Progress("gemm", 10, False, 600, clock), Blocks()
    with progress.schedule(machine):
        clock.set(5)
        machine.counts = 0, 10, 100
        machine.watch()  # 500 s
        machine.counts = 100, 0, 100
    clock.set(70)
    machine.counts = 1, 1, 100
    with (
        pytest.raises(tw.TileWeaveError) as error,
        progress.schedule(machine),
    ):
        machine.watch()
    assert str(error.value) == (
        "simulate: gemm takes an estimated 11 min or more for 10 schedules of 100 blocks; expected "
        "at most 10 min: smaller sizes, fewer schedules, or --force"
    )


def test_schedules_in_other_processes(clock, capsys):
    progress, machine = Progress("gemm", 10, True, 600, clock, jobs=3), Blocks()
    with progress.schedule(machine):
        clock.set(100)
        machine.counts = 50, 25, 100
        machine.watch()  # 75 blocks in 100 s, and as many in each of the other processes
        machine.counts = 100, 0, 100
    assert "estimated 7 min or more for 10 schedules" in capsys.readouterr().err
    clock.set(310)
    with pytest.raises(tw.TileWeaveError, match="takes an estimated 10 min or more"):
        progress.ended()  # 200 blocks have ended and 300 run: 620 s


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("tileweave.simulator.report.progress._SILENT", 0)
    monkeypatch.setattr("tileweave.simulator.report.progress._PERIOD", 0)
    path = tmp_path / "many.py"
    path.write_text(HEAD + PROGRAM)
    return str(path)


def test_command_refuses_long_simulations(file, capsys, monkeypatch):
    monkeypatch.setattr("tileweave.cli.simulation._MAX_SECONDS", 0)
    assert main(["simulate", file, "--ranks", "1"]) == 1
    said = capsys.readouterr()
    assert "simulate: many takes an estimated " in said.err and "or --force" in said.err
    assert main(["simulate", file, "--ranks", "1", "--force"]) == 0
    assert "many: 20 schedules of 1 ranks, no fault" in capsys.readouterr().out


def test_estimate_without_a_terminal_is_one_line(file, capsys):
    assert main(["simulate", file, "--ranks", "1", "--json"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("simulate: many: estimated ") and said.count("\n") == 1


def test_a_function_call_has_no_limit_and_prints_nothing(file, capsys):
    @T.prim_func
    def many(X: T.Tensor((64,), "int32")):
        with T.Kernel(64, threads=32) as block:
            X[block] = block

    assert tw.simulate(many, 1)[0]["X"][7] == 7
    assert capsys.readouterr().err == ""
