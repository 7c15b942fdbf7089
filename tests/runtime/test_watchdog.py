"""A wait that gives up becomes a message and an exception on all ranks, and the processes end.

Each rank is a process. The test writes the record as the device would.
"""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import tilelang.language as T
import torch
import torch.distributed as dist

from tests import warm
from tileweave import language as W
from tileweave.builtins.implicit import LOCS, Loc
from tileweave.runtime.host.context import Record
from tileweave.runtime.host.group import Group
from tileweave.runtime.host.watchdog import Watchdog

PROGRAM = Path(__file__).with_name("watchdog_rank.py")
REPORT = (
    "tileweave: rank 0 waited 3 s for a signal from rank 1 and gave up: wait_reached(S[0, 5]) at "
    "program.py:12; flag <0x1234>: seen 8, expected 9; block (1, 2, 3), thread 64"
)


def run(*what: str) -> list[subprocess.CompletedProcess]:
    """Run one process per rank, whose main thread does ``what``. All must end by themselves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [*warm.python(), str(PROGRAM), str(rank), str(len(what)), str(store.port), w],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, w in enumerate(what)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, *output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


@pytest.mark.parametrize("what", ["python", "launch"])
def test_every_rank_raises(what):
    """Also if a launch asks before the record is complete, and then ends the interpreter."""
    first, second = run(what, "python")
    assert (first.returncode, second.returncode) == (1, 1)
    assert first.stdout == f"raised: {REPORT}\n"
    assert second.stdout == f"raised: tileweave: rank 1 stops: {REPORT}\n"
    assert first.stderr.startswith(f"{REPORT}\n")
    assert second.stderr.startswith(f"tileweave: rank 1 stops: {REPORT}\n")


def test_a_process_that_never_returns_to_python_ends():
    """This rank and a peer have printed the reason."""
    first, second = run("stuck", "stuck")
    assert (first.returncode, second.returncode) == (1, 1)
    assert (first.stdout, second.stdout) == ("", "")
    assert first.stderr == f"{REPORT}\n"
    assert second.stderr == f"tileweave: rank 1 stops: {REPORT}\n"


def test_an_interpreter_that_cannot_end_is_ended():
    (alone,) = run("stuck_at_exit")
    assert alone.returncode == 1
    assert alone.stdout == f"raised: {REPORT}\n"


@pytest.fixture
def watchdog_without_thread(monkeypatch):
    """Return a watchdog without its thread, which would raise in pytest, and its record."""
    monkeypatch.setattr(Watchdog, "_watch", lambda self: None)
    record = Record(rank=2, peer=-1, loc=-5, flag=16)
    group = Group(2, 4, 2, torch.device("cpu"), None, None)
    return Watchdog(group, record, lambda address: f"at {address}", timeout_s=0.5), record


@pytest.mark.parametrize(
    ("dtype", "bits", "shown"),
    [
        ("int32", (1 << 64) - 1, "-1"),
        ("int64", 1 << 63, "-9223372036854775808"),
        ("uint32", (1 << 32) - 1, "4294967295"),
        ("uint64", (1 << 64) - 1, "18446744073709551615"),
    ],
)
def test_values_print_as_what_they_are(watchdog_without_thread, monkeypatch, dtype, bits, shown):
    dog, record = watchdog_without_thread
    monkeypatch.setitem(LOCS, 11, Loc("wait_eq", "F[0]", "p.py", 3, dtype))
    record.loc, record.seen, record.expected = 11, bits, 1
    assert f"seen {shown}, expected 1;" in dog.report()
    record.seen, record.expected = 1, bits
    assert f"seen 1, expected {shown};" in dog.report()


def test_unknown_site_and_peer(watchdog_without_thread):
    dog, record = watchdog_without_thread
    record.loc = 0x1F
    assert dog.report() == (
        "tileweave: rank 2 waited 0.5 s for a signal and gave up: wait 0x1f; flag at 16: seen 0, "
        "expected 0; block (0, 0, 0), thread 0"
    )


def test_ranks_that_share_a_gpu_are_told_why_a_copy_may_not_come(watchdog_without_thread):
    dog, _ = watchdog_without_thread
    assert "share a GPU" not in dog.report()
    dog._group = replace(dog._group, gpus=("a", "b", "a", "b"))
    assert dog.report().endswith("expected a GPU for each rank, or such a kernel of fewer blocks")


def test_a_launch_goes_on_where_nothing_gave_up(watchdog_without_thread):
    dog, _ = watchdog_without_thread
    assert dog.raise_if_deadlocked() is None


def test_sites_know_the_type_of_their_flag():
    before = set(LOCS)

    @T.prim_func
    def program(F: T.Tensor((8,), "uint64"), G: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            W.wait_eq(F[3], 1)
            W.wait_eq(G[4], 1)

    locs = [LOCS[number] for number in LOCS if number not in before]
    assert [(loc.op, loc.operand, loc.dtype) for loc in locs] == [
        ("wait_eq", "F[3]", "uint64"),
        ("wait_eq", "G[4]", "int32"),
    ]
    assert all(loc.file == __file__ and loc.line > 0 for loc in locs)


@pytest.mark.parametrize(
    ("op", "seen", "expected", "text"),
    [
        ("announce", 70, 64, "announced 70 rows of a segment; expected 0 to 64"),
        ("announce", -1, 64, "announced -1 rows of a segment; expected 0 to 64"),
        ("check_row", 3, 64, "wrote row 3 of a segment twice in a launch"),
        ("check_row", 64, 64, "wrote row 64 of a segment of 64 rows"),
        ("check_row", -1, 64, "wrote row -1 of a segment of 64 rows"),
        ("check_amount", 5, 4, "wrote 5 units to a segment, in all launches, and announced 4"),
    ],
)
def test_report_of_rows(monkeypatch, op, seen, expected, text):
    monkeypatch.setitem(LOCS, 7, Loc(op, "inbox[1, 0]", "program.py", 12, "float32"))
    alone = Group(0, 1, 0, torch.device("cpu"), None, None)
    record = Record(loc=7, rank=1, peer=-1, flag=0x1234, expected=expected, seen=seen % 2**64)
    watchdog = Watchdog(alone, record, lambda flag: "[1, 0]", 3)
    try:
        report = watchdog.report()
    finally:
        watchdog.close()
    assert report == (
        f"tileweave: rank 1 {text}: {op}(inbox[1, 0]) at program.py:12; [1, 0]; block (0, 0, 0), "
        "thread 0"
    )
