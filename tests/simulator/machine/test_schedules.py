"""Schedules that several processes share: the result is that of one process."""

import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections import Counter

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.cli.test_cli import HEAD
from tileweave import language as W
from tileweave.cli.main import main
from tileweave.simulator import schedules
from tileweave.simulator.report.progress import Progress

JOBS = pytest.mark.parametrize("jobs", [1, 2, 3])
UNREAD = pytest.mark.filterwarnings("ignore::tileweave.SimulationWarning")
HERE = os.getpid()


@T.prim_func
def tickets(
    count: T.Tensor((1,), "uint32"), order: T.Tensor((16,), "uint32"),
    unread: W.Symmetric((1,), "uint32"),
):  # fmt: skip
    with T.Kernel(16, threads=32) as block:
        if T.get_thread_binding() == 0:
            order[block] = W.atom_add(count[0], 1)
            W.signal(unread[(W.rank() + 1) % W.world_size(), 0])


@T.prim_func
def fails_for_some_orders(count: T.Tensor((1,), "uint32"), order: T.Tensor((8,), "uint32")):
    with T.Kernel(8, threads=32) as block:
        if T.get_thread_binding() == 0:
            ticket = T.alloc_var("uint32")
            ticket = W.atom_add(count[0], 1)
            T.device_assert(ticket + block != 14)
            order[block] = ticket


@T.prim_func
def divides_threads(count: T.Tensor((1,), "uint32"), order: T.Tensor((4,), "uint32")):
    with T.Kernel(4, threads=32) as block:
        ticket = T.alloc_shared((1,), "uint32")
        if T.get_thread_binding() == 0:
            ticket[0] = W.atom_add(count[0], 1)
        T.sync_threads()
        if T.get_thread_binding() == 0:
            T.print(ticket[0])
            W.st(order[block], 0)
        T.sync_threads()
        if T.get_thread_binding() < T.Cast("int32", ticket[0]) * (block + 1) * 4 - 24:
            W.signal(order[block])


def zeros(ranks=1):
    return [{"count": np.zeros(1, np.uint32)} for _ in range(ranks)]


def simulated(program, jobs, number=7, ranks=1, epochs=1, **arguments):
    inputs = zeros(ranks)
    if program is tickets:
        inputs = [{**i, "unread": np.zeros(1, np.uint32)} for i in inputs]
    return tw.simulate(
        program, ranks, inputs, schedules=number, epochs=epochs, jobs=jobs, **arguments
    )


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return the seeds that each process ran, by its id, and the function that notes them."""
    path, run = tmp_path / "runs", schedules.run_schedule

    def noted(case, seed, *arguments):
        with path.open("a") as file:
            print(os.getpid(), seed, file=file)
        noted.before(seed)
        return run(case, seed, *arguments)

    def by_process():
        seeds = {}
        for process, seed in (map(int, line.split()) for line in path.read_text().splitlines()):
            seeds.setdefault(process, []).append(seed)
        return seeds

    noted.before = lambda seed: None
    noted.by_process = by_process
    noted.others = set(multiprocessing.active_children())  # ranks of other tests may still live
    monkeypatch.setattr(schedules, "run_schedule", noted)
    return noted


@UNREAD
def test_schedules_are_shared_out(runs):
    simulated(tickets, 3, 8, ranks=2, seed=20)
    seeds = runs.by_process()
    assert seeds.pop(HERE) == [20]
    assert sorted(seeds.values()) == [[21, 24, 27], [22, 25], [23, 26]]
    assert set(multiprocessing.active_children()) <= runs.others


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_outputs_are_those_of_the_last_schedule(number):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        expected = simulated(tickets, 1, number, ranks=2)
        first = [str(w.message) for w in warned]
        outputs = simulated(tickets, 2, number, ranks=2)
    assert [str(w.message) for w in warned] == first * 2 and first
    for rank, tensors in enumerate(outputs):
        for name, values in tensors.items():
            assert values.dtype == expected[rank][name].dtype
            np.testing.assert_array_equal(values, expected[rank][name])


def test_the_first_fault_is_reported():
    reports = []
    for jobs in (1, 2, 3):
        with pytest.raises(tw.SimulationError) as error:
            simulated(fails_for_some_orders, jobs, 40, seed=2)
        reports.append((error.value.kind, error.value.seed, error.value.report))
    assert reports[0][0] == "assertion" and reports[0][1] >= 4
    assert reports[1:] == reports[:1] * 2


@JOBS
def test_schedules_after_a_division_of_threads_have_the_finer_groups(jobs, runs, capsys):
    outputs = simulated(divides_threads, jobs, 12, seed=5)
    printed = capsys.readouterr().out
    # The process repeats schedules that divide threads, because later ones depend on that.
    assert runs.by_process()[HERE] == ([*range(5, 17)] if jobs == 1 else [5, 7, 8])
    expected = simulated(divides_threads, 1, 12, seed=5)
    assert outputs[0]["order"].tolist() == expected[0]["order"].tolist()
    assert printed == capsys.readouterr().out and printed.count("\n") == 12 * 4


@JOBS
def test_an_exception_is_raised_with_its_message(jobs, runs):
    def fail(seed):
        if seed >= 4:
            raise ZeroDivisionError(f"in schedule {seed}")

    runs.before = fail
    with pytest.raises(ZeroDivisionError, match="in schedule 4"):
        simulated(tickets, jobs, ranks=2)
    assert set(multiprocessing.active_children()) <= runs.others


@UNREAD
def test_a_warning_appears_once(runs):
    runs.before = lambda seed: seed == 4 and warnings.warn("four", stacklevel=1)
    with pytest.warns(UserWarning, match="four") as warned:
        simulated(tickets, 2, ranks=2)
    assert Counter(str(w.message) for w in warned)["four"] == 1


@UNREAD
def test_a_killed_process_is_replaced(runs):
    def kill(seed):
        if seed == 3 and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)

    runs.before = kill
    outputs = simulated(tickets, 2, ranks=2)
    assert runs.by_process()[HERE] == [0, 3]
    expected = simulated(tickets, 1, ranks=2)
    assert [o["order"].tolist() for o in outputs] == [o["order"].tolist() for o in expected]


def test_an_interrupt_ends_all_processes(runs, monkeypatch):
    def interrupt(progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        simulated(tickets, 2, 50, ranks=2)
    assert set(multiprocessing.active_children()) <= runs.others
    assert sum(map(len, runs.by_process().values())) < 50


@UNREAD
def test_the_timeline_is_that_of_the_last_schedule(tmp_path):
    traces = []
    for jobs in (1, 2):
        simulated(tickets, jobs, ranks=2, timeline=tmp_path / "run.json")
        traces.append(json.loads((tmp_path / "run.json").read_text()))
    assert traces[0] == traces[1] and traces[0]["otherData"]["seed"] == 6


@UNREAD
def test_short_schedules_are_not_shared_out_by_default(runs, monkeypatch):
    monkeypatch.setattr(schedules, "default_jobs", lambda: 2)
    simulated(tickets, None, 4, ranks=2)
    assert list(runs.by_process()) == [HERE]
    monkeypatch.setattr(schedules, "_WORTH", 0)
    simulated(tickets, None, 4, ranks=2)
    assert len(runs.by_process()) == 3


@UNREAD
def test_each_process_may_need_as_much_memory_as_this_one(runs, monkeypatch):
    monkeypatch.setattr(schedules, "default_jobs", lambda: 2)
    monkeypatch.setattr(schedules, "_WORTH", 0)
    monkeypatch.setattr(schedules, "free_memory", lambda: 1 << 20)
    simulated(tickets, None, 4, ranks=2)
    assert list(runs.by_process()) == [HERE]


def test_default_number_of_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    assert schedules.default_jobs() == 3
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert schedules.default_jobs() == 1


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_illegal_numbers_of_processes_are_refused(jobs):
    with pytest.raises(tw.TileWeaveError, match=r"simulate: jobs=.*; expected an integer from 1"):
        simulated(tickets, jobs)


def test_command(tmp_path, capsys, runs):
    path = tmp_path / "many.py"
    path.write_text(HEAD + MANY)
    assert main(["simulate", str(path), "--ranks", "1", "--schedules", "5", "--jobs", "2"]) == 0
    assert "many: 5 schedules of 1 ranks, no fault" in capsys.readouterr().out
    assert len(runs.by_process()) == 3
    assert main(["simulate", str(path), "--jobs", "0"]) == 1
    assert "simulate: jobs=0; expected an integer from 1" in capsys.readouterr().err


MANY = """
@T.prim_func
def many(X: T.Tensor((64,), "int32")):
    with T.Kernel(64, threads=32) as block:
        X[block] = block
"""
