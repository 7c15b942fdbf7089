"""Every mutant of what the inference puts in is killed by the simulator, or explained.

The programs that take the least time are tested; ``TILEWEAVE_MUTANTS=all`` tests all of them, as
``docs/mutants-inferred.md`` lists them.
"""

import os
from pathlib import Path

import numpy as np
import pytest

import tileweave as tw
from tileweave.simulator import Mutant

from .programs import CASES

FEW = ("ring_shift", "all_gather_loads", "gemm_reduce_scatter", "own_in_place", "two_producers")
NAMES = tuple(CASES) if os.environ.get("TILEWEAVE_MUTANTS") == "all" else FEW
SCHEDULES = 5
PAGE = Path(__file__).resolve().parents[2] / "docs" / "mutants-inferred.md"


def mutants(name: str) -> list[Mutant]:
    """All mutants of a program, in the smallest group in which they make sense."""
    case = CASES[name]
    inputs = case.inputs(np.random.default_rng(0), case.mutated)
    return tw.mutate(case.called(case.mutated), case.mutated, inputs, SCHEDULES)


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_accounted_for(name):
    found = mutants(name)
    assert {m.op for m in found if m.verdict == "killed"} >= {"signal", "wait_reached"}
    assert [(m.line, m.name, m.verdict, m.why) for m in found if not m.is_accounted_for] == []
    killed = sum(m.verdict == "killed" for m in found)
    listed = f"## {name}\n\n{CASES[name].mutated} ranks: {killed} killed"
    assert listed in PAGE.read_text(), "run `make docs`"
