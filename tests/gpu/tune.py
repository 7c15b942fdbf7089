"""Tuning on real GPUs: equal choices on all ranks, never a wrong program, stored, right afterwards.

    torchrun --nproc-per-node=2 tests/gpu/tune.py [CHECK ...]

Each check is an operator: two small shapes, of few candidates. Among them are one that is made
wrong here, one that does not fit into shared memory, and one that does not compile.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_gpus import GPU, Verdicts, main, parser_of, say
from tileweave import ops
from tileweave.ops.autotune import store as measured
from tileweave.ops.autotune.store import table_for
from tileweave.ops.autotune.trial import TOLERANCE, Trial, problem_of
from tileweave.ops.core.compiled import op_cache_of
from tileweave.ops.core.groups import group_of
from tileweave.ops.core.registry import OPERATORS, operators_of
from tileweave.ops.core.tiles import LARGE, SMALL, Choice, Tiles
from tileweave.ops.gemm import gemm_operator
from tileweave.ops.gemm.gemm_operator import GemmOperator
from tileweave.runtime.executor.recorded_calls import invalidate
from tileweave.runtime.host.session import current

SHAPES = [(512, 1024, 1024), (2048, 2048, 4096)]
NEW = (1024, 1024, 2048)
"""Problems that a first call tunes."""
NAMES = list(operators_of(GemmOperator))
TOO_LARGE, ODD = Tiles(256, 256, 128, stages=4), Tiles(100, 100, 64, stages=2)


def tamper(name: str) -> None:
    """Give an operator a program "wrong" that changes one number, on the last rank only."""
    operator = OPERATORS[name]

    class Tampered(operator, op=name):
        programs: ClassVar = {**operator.programs, "wrong": None}

        @classmethod
        def genuine(cls, problem, choice):
            if choice.program != "wrong":
                return choice
            return replace(choice, program=operator.table(problem).program)

        @classmethod
        def program(cls, problem, choice):
            return super().program(problem, cls.genuine(problem, choice))

        def __init__(self, problem, choice, session):
            super().__init__(problem, self.genuine(problem, choice), session)
            self.is_wrong = choice.program == "wrong"

        def __call__(self, *tensors):
            super().__call__(*tensors)
            c = tensors[-1]
            if self.is_wrong and group_of("").rank == self.problem.ranks - 1:
                c[-1, -1] += 1000 * c.abs().max()

        @classmethod
        def candidates(cls, problem):
            few = [Choice(p, t) for p in operator.programs for t in (LARGE, SMALL)]
            few = [choice for choice in few if operator.has_choice(problem, choice)]
            program = operator.table(problem).program
            return [Choice("wrong", SMALL), Choice(program, TOO_LARGE), Choice(program, ODD), *few]


def check_tuned(name: str, shape: tuple[int, int, int]) -> str:
    """Tune one shape."""
    group, heap = group_of(""), current().heap
    free = heap._free.largest
    (tuned,) = ops.tune(name, [shape])
    if group.rank == 0:
        print(tuned, flush=True)
    if len(set(group.exchange("check", str(tuned.measured)))) > 1:
        return f"the ranks chose differently: {tuned.measured}"
    reasons = {(a.choice.program, a.choice.tiles): a.reason for a in tuned.attempts}
    table = OPERATORS[name].table(tuned.problem)
    if "relative error" not in reasons["wrong", SMALL]:
        return f"what is wrong was not left out: {reasons['wrong', SMALL]!r}"
    if "shared memory" not in reasons[table.program, TOO_LARGE]:
        return f"what is too large was not left out: {reasons[table.program, TOO_LARGE]!r}"
    if not reasons[table.program, ODD]:
        return "what does not compile was not left out"
    right = [key for key, reason in reasons.items() if not reason]
    if len(right) < 2 or (tuned.measured.choice.program == "wrong"):
        return f"{tuned.measured.choice} won of {right}"
    choice = tuned.measured.choice
    operator = op_cache_of(group).operators[tuned.problem, choice]
    trial = Trial(tuned.problem, group)
    a, b = trial.inputs()
    for strategy in ("fused", "auto"):
        trial.c.fill_(float("nan"))
        getattr(ops, name)(a, b, out=trial.c, strategy=strategy)
        if (error := trial.error_of(a, b, trial.c)) > TOLERANCE:
            return f"{strategy} after tuning: relative error {error:.1e}"
    if op_cache_of(group).operators[tuned.problem, choice] is not operator:
        return "the winner was compiled again"
    said = ops.strategy_of(getattr(ops, name), a, b)
    if said != tuned.measured.strategy:
        return f"strategy_of says {said}"
    del op_cache_of(group).operators[tuned.problem, choice]
    operator.free()
    if heap._free.largest != free:
        return f"{free - heap._free.largest} bytes of the heap are lost"
    return check_kept(name, tuned)


def check_kept(name: str, actual: ops.Tuned) -> str:
    """A later process does not tune, although it may."""
    group = group_of("")
    del table_for(group)[actual.problem]
    invalidate()
    os.environ["TILEWEAVE_TUNE"] = "1"
    tune_problem, gemm_operator.tune_problem = gemm_operator.tune_problem, _never
    try:
        trial = Trial(actual.problem, group)
        a, b = trial.inputs()
        getattr(ops, name)(a, b, out=trial.c)
    finally:
        gemm_operator.tune_problem = tune_problem
        del os.environ["TILEWEAVE_TUNE"]
    if table_for(group)[actual.problem] != actual.measured:
        return f"{table_for(group)[actual.problem]} is on disk; expected {actual.measured}"
    error = trial.error_of(a, b, trial.c)
    return "" if error <= TOLERANCE else f"as kept on disk: relative error {error:.1e}"


def _never(*_) -> None:
    raise AssertionError("what is on disk is tuned again")


def check_first_call(name: str) -> str:
    """A call of a new problem with ``TILEWEAVE_TUNE=1`` is right, and so is its graph."""
    group = group_of("")
    problem = problem_of(name, *NEW, group.world_size, torch.bfloat16)
    trial = Trial(problem, group)
    a, b = trial.inputs()
    os.environ["TILEWEAVE_TUNE"] = "1"
    try:
        getattr(ops, name)(a, b, out=trial.c)
    finally:
        del os.environ["TILEWEAVE_TUNE"]
    if table_for(group).get(problem) is None:
        return "the first call did not tune"
    if (error := trial.error_of(a, b, trial.c)) > TOLERANCE:
        return f"the call that tuned: relative error {error:.1e}"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    getattr(ops, name)(a, b, out=trial.c, strategy="fused")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        getattr(ops, name)(a, b, out=trial.c, strategy="fused")
    a.normal_().div_(8)
    graph.replay()
    torch.cuda.synchronize()
    error = trial.error_of(a, b, trial.c)
    return "" if error <= TOLERANCE else f"a graph of it: relative error {error:.1e}"


def verdicts(options: argparse.Namespace) -> Verdicts:
    group = group_of("")
    # Not the user's file.
    folder = group.exchange("folder", tempfile.mkdtemp() if group.rank == 0 else "")[0]
    measured.file_of = lambda group: Path(folder) / "tuned.json"
    for name in options.checks or NAMES:
        tamper(name)
        for shape in SHAPES:
            yield f"{name}: tuned {shape}", check_tuned(name, shape)
        yield f"{name}: first call", check_first_call(name)


if __name__ == "__main__":
    if not GPU:
        say("tune: not run: no GPU")
        sys.exit(1)
    sys.exit(main(verdicts, parser_of(__doc__, NAMES), heap_bytes=1 << 28))
