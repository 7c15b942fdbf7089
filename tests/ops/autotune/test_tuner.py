"""Tuning: the winner, the stored result and the agreement of ranks.

Operators and times are stand-ins; ranks are threads with real exchanges; test_torch.py tunes on
processes.
"""

from __future__ import annotations

import json
import math
import re
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tilelang import env

import tileweave as tw
from tests.groups import one_rank
from tileweave import ops
from tileweave.cli.main import main
from tileweave.ops.autotune import store as measured
from tileweave.ops.autotune import tuner
from tileweave.ops.autotune.store import Measurement, file_of, save, saved, table_for
from tileweave.ops.core.compiled import OpCache
from tileweave.ops.core.problem import Problem
from tileweave.ops.core.registry import OPERATORS
from tileweave.ops.core.tiles import CANDIDATES, LARGE, SHARED_BYTES, SMALL, Choice, Tiles
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.matmul_all_reduce import MatmulAllReduce
from tileweave.runtime.host.group import Group

OP = "matmul_all_reduce"
ASKED = Problem(OP, 24, 16, 8, 2, torch.bfloat16, True)
HUGE = Tiles(256, 256, 128, stages=4)
ALONE = one_rank()
FAST = Measurement(Choice("two_shot", SMALL), 0.5, 0.75)


class StandIn(MatmulAllReduce):
    """Operator that multiplies as the name of its program says, and records who was freed.

    For torch.distributed each thread is a single rank: the sum over ranks is its own value.
    """

    programs = dict.fromkeys(
        ("two_shot", "quick", "slow", "wrong", "wrong on rank 1", "drifts", "refused",
         "refused on rank 1", "fails", "no room")
    )  # fmt: skip
    alive: list[str]
    here: threading.local
    tried: tuple[str, ...]

    @classmethod
    def program(cls, problem, choice):
        if choice.program == "refused":
            raise RuntimeError("no program")
        return choice

    def __init__(self, problem, choice, session):
        self.name, self.calls = choice.program, 0
        if choice.tiles == HUGE:
            raise AssertionError("compiled")
        if self.name == "refused" or self.name == f"refused on rank {self.here.group.rank}":
            raise RuntimeError("nvcc:\n no")
        if self.name == "no room":
            raise tw.runtime.HeapExhausted("symmetric: full")
        self.alive.append(self.name)

    def __call__(self, a, b, *tensors):
        *_, c = tensors
        self.calls += 1
        if self.name == "fails":
            raise RuntimeError("cannot be launched")
        self.unfused(a, b, c, self.here.group, None)
        wrong = self.name in ("wrong", f"wrong on rank {self.here.group.rank}")
        if wrong or (self.name == "drifts" and self.calls > 4):
            c[0, 0] = float("nan")

    def free(self):
        self.alive.remove(self.name)

    @staticmethod
    def unfused(a, b, c, group, epilogue):
        torch.mm(a, b, out=c)

    @staticmethod
    def estimates(problem):
        return {Choice("two_shot", LARGE): 1.0}

    @classmethod
    def candidates(cls, problem):
        return [
            Choice(name, LARGE) if name != "huge" else Choice("quick", HUGE) for name in cls.tried
        ]


TIMES = {"two_shot": 2.0, "quick": 1.0, "slow": 3.0, "nccl": 1.5} | dict.fromkeys(
    ("wrong", "wrong on rank 1", "drifts", "fails"), 0.1
)


@pytest.fixture
def contest(every_rank, monkeypatch, tmp_path):
    """Tune ``ASKED`` on two ranks with these candidates. Return the results of each rank, and the
    candidates that still exist."""
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(OPERATORS, OP, StandIn)
    here = threading.local()
    monkeypatch.setattr(StandIn, "here", here, raising=False)
    monkeypatch.setattr(StandIn, "alive", [], raising=False)
    monkeypatch.setattr(tuner, "op_cache_of", lambda group: here.kept)
    monkeypatch.setattr(
        tuner, "compile_ahead", lambda programs, group: run.ahead.append(list(programs))
    )

    def interleaved(contenders, inputs, group, *, warmups, runs, before, after):
        for turn in range(6):
            for name, call in contenders.items():
                before(name, turn % len(inputs))
                after(name, turn % len(inputs), call(turn % len(inputs)))
        return {
            name: TIMES[getattr(call.args[0], "name", "nccl")] + run.later * group.rank
            for name, call in contenders.items()
        }

    monkeypatch.setattr(tuner, "interleaved", interleaved)

    def run(*tried, function=lambda group: tuner.tune_problem(ASKED, group)):
        monkeypatch.setattr(StandIn, "tried", tried, raising=False)

        def rank(group):
            here.group, here.kept = group, OpCache(types.SimpleNamespace(group=group))
            run.kept.append(here.kept)
            return function(group)

        return every_rank(rank)

    run.later, run.kept, run.ahead = 0.0, [], []
    return run


def alike(actual):
    """Return the result of all ranks, which must be equal."""
    for each in actual:
        if isinstance(each, Exception):
            raise each
    assert actual[0] == actual[1]
    return actual[0]


def reasons(tuned):
    return {a.choice.program: a.reason for a in tuned.attempts}


def test_the_fastest_wins_and_the_others_are_freed(contest):
    tuned = alike(contest("slow", "quick", "slow"))
    assert tuned.measured == Measurement(Choice("quick", LARGE), 1.0, 1.5)
    assert [(a.choice.program, a.ms) for a in tuned.attempts] == [
        ("two_shot", 2.0), ("slow", 3.0), ("quick", 1.0)
    ]  # fmt: skip
    assert StandIn.alive == ["quick"] * 2
    for kept in contest.kept:
        assert list(kept.operators) == [(ASKED, Choice("quick", LARGE))]
    assert str(tuned).startswith(f"{ASKED}: fused: measured: fused 1.000 ms, nccl 1.500 ms (quick")


def test_what_is_as_fast_does_not_replace_the_table(contest, monkeypatch):
    monkeypatch.setitem(TIMES, "quick", 2.0)
    assert alike(contest("quick")).measured.choice.program == "two_shot"


def test_nccl_may_be_faster(contest):
    measured = alike(contest("slow")).measured
    assert measured == Measurement(Choice("two_shot", LARGE), 2.0, 1.5)
    assert measured.strategy == ("nccl", "measured: fused 2.000 ms, nccl 1.500 ms")


@pytest.mark.parametrize("program", ["wrong", "wrong on rank 1", "drifts"])
def test_what_is_wrong_never_wins(contest, program):
    """Although it is the fastest, from its first call on or later, on any rank."""
    tuned = alike(contest(program, "quick"))
    assert tuned.measured.choice.program == "quick"
    assert reasons(tuned)[program] == "relative error inf; expected at most 0.01"
    assert StandIn.alive == ["quick"] * 2


def test_the_best_may_turn_out_wrong(contest, monkeypatch):
    """After many right calls, when it is compared with NCCL or another candidate."""
    monkeypatch.setattr(StandIn, "table", staticmethod(lambda problem: Choice("drifts", LARGE)))
    for tried in ((), ("slow",)):
        StandIn.alive.clear()
        tuned = alike(contest(*tried))
        assert "drifts" in reasons(tuned) and "drifts" not in StandIn.alive
        assert tuned.measured.choice == (Choice("slow", LARGE) if tried else None)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("refused", "RuntimeError: nvcc: no"),
        ("refused on rank 1", "RuntimeError: nvcc: no"),
        ("fails", "RuntimeError: cannot be launched"),
        ("no room", f"HeapExhausted: {ASKED}: symmetric: full"),
        ("huge", f"524288 bytes of shared memory; expected at most {SHARED_BYTES}"),
    ],
)
def test_what_is_left_out_on_all_ranks(contest, program, reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuned = alike(contest(program, "slow"))
    # What a larger heap may change is told, by rank 0, and not kept.
    homeless = program == "no room"
    told = (
        f"1 of 3 candidates of {ASKED} were not measured, so the result is not stored on disk: Heap"
    )
    assert [told in str(w.message) for w in caught] == [True] * homeless
    assert (saved(ASKED, Group(0, 2, 0, ALONE.device, None, None)) is None) == homeless
    left_out = [a for a in tuned.attempts if a.reason]
    assert [(a.ms, a.reason) for a in left_out] == [(None, reason)]
    assert tuned.measured.choice.program == "two_shot"
    assert f"left out: {left_out[0].choice}: {reason}" in str(tuned)
    ahead = {"two_shot", "slow", program} - {"refused", "huge"}
    assert [{c.program for c in programs} for programs in contest.ahead] == [ahead] * 2


def test_nothing_fused_is_right(contest, monkeypatch):
    monkeypatch.setattr(StandIn, "table", staticmethod(lambda problem: Choice("wrong", LARGE)))
    measured = alike(contest()).measured
    assert measured == Measurement(None, None, 1.5) and StandIn.alive == []
    assert measured.strategy == ("nccl", "measured: nccl 1.500 ms, fused never right")
    with pytest.raises(tw.TileWeaveError, match=r"strategy='fused', but measured: nccl 1\.500"):
        gemm_operator.preferred_strategy("fused", ASKED, measured)


def test_ranks_whose_times_differ_take_those_of_rank_0(contest):
    contest.later = -0.9
    assert alike(contest("quick", "slow")).measured == Measurement(Choice("quick", LARGE), 1.0, 1.5)


def test_ranks_that_tune_different_problems(contest):
    def tune(group):
        return tuner.tune_problem(replace(ASKED, N=16 + 8 * group.rank), group)

    for error in contest("quick", function=tune):
        assert isinstance(error, tw.TileWeaveError) and "tune: the ranks disagree" in str(error)


def test_only_rank_0_writes(contest, monkeypatch):
    writers = []
    monkeypatch.setattr(tuner, "save", lambda problem, group, _: writers.append(group.rank))
    alike(contest("quick"))
    assert writers == [0]


def choices(requested="auto"):
    def choose(group):
        first = gemm_operator.choice_of(requested, ASKED, group)
        assert gemm_operator.choice_of(requested, ASKED, group) == first
        return first

    return choose


def test_calls_take_what_was_measured(contest):
    def tune_and_call(group):
        tuner.tune_problem(ASKED, group)
        return gemm_operator.choice_of("auto", ASKED, group)

    assert alike(contest("quick", function=tune_and_call)) == Choice("quick", LARGE)
    # A process that comes later: another group, the same disk.
    assert alike(contest("slow", function=choices())) == Choice("quick", LARGE)
    biased = replace(ASKED, biased=True)
    choose = lambda group: gemm_operator.choice_of("auto", biased, group)  # noqa: E731
    assert alike(contest("slow", function=choose)) == Choice("quick", LARGE)


def test_what_was_decided_before_is_decided_anew(contest, monkeypatch):
    forgot = []
    monkeypatch.setattr(tuner, "invalidate", lambda: forgot.append(True))
    alike(contest("quick"))
    assert len(forgot) == 2


def test_auto_takes_nccl_where_that_was_faster(contest):
    alike(contest("slow"))
    assert alike(contest(function=choices("auto"))) is None
    assert alike(contest(function=choices("fused"))) == Choice("two_shot", LARGE)


def test_without_a_measurement_the_table_serves(contest):
    assert alike(contest("quick", function=choices())) == StandIn.table(ASKED)
    assert StandIn.alive == []


def test_the_first_call_tunes_if_asked_to(contest, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_TUNE", "1")
    assert alike(contest("quick", function=choices())) == Choice("quick", LARGE)
    StandIn.alive.clear()
    assert alike(contest("slow", function=choices())) == Choice("quick", LARGE)
    assert StandIn.alive == []


def test_nothing_is_tuned_while_a_graph_is_captured(contest, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_TUNE", "1")
    monkeypatch.setattr(gemm_operator, "capturing", lambda: True)
    assert alike(contest("quick", function=choices())) == StandIn.table(ASKED)
    monkeypatch.setattr(gemm_operator, "capturing", lambda: False)
    assert alike(contest("quick", function=choices())) == Choice("quick", LARGE)


def test_the_variable_is_0_or_1(contest, monkeypatch):
    monkeypatch.setenv("TILEWEAVE_TUNE", "yes")
    for error in contest(function=choices()):
        assert "TILEWEAVE_TUNE='yes'; expected 0 or 1" in str(error)


def test_either_all_ranks_may_tune_or_none(contest, monkeypatch):
    """Nothing was measured before."""
    may = iter([True, False])
    monkeypatch.setattr(gemm_operator, "_tuning_enabled", lambda: next(may))
    for error in contest("quick", function=choices()):
        assert re.search("TILEWEAVE_TUNE is 1 on rank [01] only; expected the same", str(error))


def test_ranks_with_other_files_do_as_rank_0_does(contest, monkeypatch):
    on_disk = {0: FAST, 1: Measurement(Choice("slow", LARGE), 9.0, 1.0)}
    monkeypatch.setattr(measured, "saved", lambda problem, group: on_disk[group.rank])
    assert alike(contest(function=choices())) == FAST.choice
    on_disk[0] = None
    assert alike(contest(function=choices())) == StandIn.table(ASKED)


@pytest.fixture
def disk(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "TILELANG_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("found", [FAST, Measurement(None, None, 0.25)])
def test_on_disk_and_back(disk, found):
    assert saved(ASKED, ALONE) is None
    save(replace(ASKED, N=32), ALONE, Measurement(None, None, 1.0))
    save(ASKED, ALONE, found)
    assert saved(ASKED, ALONE) == found
    assert saved(replace(ASKED, transposed=False), ALONE) is None
    assert [f.name for f in disk.rglob("*") if f.is_file()] == [file_of(ALONE).name]
    said = json.loads(file_of(ALONE).read_text())
    assert said["ranks"] == 1 and said["torch"] == torch.__version__ and len(said["results"]) == 2


def test_who_saves_at_the_same_time_loses_nothing(disk):
    every = [replace(ASKED, N=8 * n) for n in range(1, 25)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda problem: save(problem, ALONE, FAST), every))
    assert [saved(problem, ALONE) for problem in every] == [FAST] * len(every)


@pytest.mark.parametrize("what", ["gpu", "ranks", "tileweave", "tilelang", "torch"])
def test_results_of_other_machines_and_versions_are_not_taken(disk, monkeypatch, what):
    save(ASKED, ALONE, FAST)
    here = measured.machine(ALONE)
    monkeypatch.setattr(measured, "machine", lambda group: here | {what: "other"})
    assert saved(ASKED, ALONE) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"results": []}',
        json.dumps({"results": {str(ASKED): 3}}),
        json.dumps({"results": {str(ASKED): {"choice": None, "fused": None}}}),
        json.dumps({"results": {str(ASKED): {"choice": None, "fused": None, "nccl": -1}}}),
        json.dumps({"results": {str(ASKED): {"choice": None, "fused": None, "nccl": math.inf}}}),
        json.dumps({"results": {str(ASKED): {"choice": None, "fused": None, "nccl": 10**400}}}),
        str(FAST).join((f'{{"results": {{"{ASKED}": ', "}}")).replace("two_shot", "three_phase"),
        str(FAST).join((f'{{"results": {{"{ASKED}": ', "}}")).replace("stages", "steps"),
        str(FAST).join((f'{{"results": {{"{ASKED}": ', "}}")).replace('"stages": 6', '"stages": 0'),
    ],
)
def test_a_file_that_is_none_is_told_and_replaced(disk, text):
    file = file_of(ALONE)
    file.parent.mkdir()
    file.write_text(text)
    with pytest.warns(UserWarning, match=r"tuned-\w+.json is not what tw.tune writes"):
        assert saved(ASKED, ALONE) is None
    save(ASKED, ALONE, FAST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saved(ASKED, ALONE) == FAST


def test_no_place_to_write(disk):
    (disk / "tileweave").write_text("a file")
    with pytest.warns(UserWarning, match="the results of tuning are lost when the process ends"):
        save(ASKED, ALONE, FAST)


def test_strategy_of_says_what_was_measured(disk, monkeypatch):
    monkeypatch.setattr(gemm_operator, "obstacle", lambda *_: None)
    a, b = torch.ones(24, 8).bfloat16(), torch.ones(16, 8).bfloat16().t()
    problem = replace(ASKED, ranks=1)
    said = lambda: ops.strategy_of(ops.matmul_all_reduce, a, b)  # noqa: E731
    assert said() == ("nccl", "predicted: fused 0.005 ms, nccl 0.004 ms")
    save(problem, ALONE, FAST)
    assert said() == ("fused", "measured: fused 0.500 ms, nccl 0.750 ms")
    monkeypatch.setitem(table_for(ALONE), problem, replace(FAST, nccl=0.25))
    assert said() == ("nccl", "measured: fused 0.500 ms, nccl 0.250 ms")


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", OP])
def test_candidates_fit(op):
    """They include the choice of the table, have no duplicates, and fit into shared memory."""
    problem = Problem(op, 1024, 8192, 4096, 4, torch.bfloat16, True)
    choices = list(OPERATORS[op].candidates(problem))
    assert OPERATORS[op].table(problem) in choices and len(set(choices)) == len(choices) > 5
    assert all(c.tiles.shared_bytes(2) <= SHARED_BYTES for c in choices)
    assert len({str(c) for c in choices}) == len(choices)
    assert {c.program for c in choices} <= set(OPERATORS[op].programs)
    assert {LARGE, SMALL} <= set(CANDIDATES)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gemm", [(8, 8, 8)]), "tune: op=gemm; expected all_gather_matmul or"),
        ((3, [(8, 8, 8)]), "tune: op=3; expected all_gather_matmul or"),
        ((ops.all_gather_matmul, [(8, 8)]), "tune: shape=(8, 8); expected (M, N, K)"),
        ((OP, [(8, 8, -8)]), "tune: shape=(8, 8, -8); expected (M, N, K)"),
        ((OP, (8, 8, 8)), "tune: shape=8; expected (M, N, K)"),
        ((OP, [(8, 8, 8)], "bfloat16"), "tune: dtype='bfloat16'; expected a torch.dtype"),
        ((OP, [(8, 8, 8)]), "tune: matmul_all_reduce of (8, 8) x transposed (8, 8) bfloat16: the "
         "tensors are on cpu; expected cuda"),
    ],
)  # fmt: skip
def test_tune_refuses(args, message):
    with pytest.raises(tw.TileWeaveError) as error:
        tw.tune(*args)
    assert message in str(error.value)


def test_command_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["tune", "--help"])
    assert end.value.code == 0 and "--shapes" in capsys.readouterr().out
    assert main(["tune", "--shapes", "64x64x64"]) == 1
    assert "the tensors are on cpu; expected cuda" in capsys.readouterr().err
    assert main(["tune", "moe"]) == 1
    assert "tune: moe; expected all_gather_matmul" in capsys.readouterr().err
