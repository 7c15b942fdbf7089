"""The simulator kills every mutant of the inserted synchronization, or a reason explains it.

The cheapest programs are tested; ``TILEWEAVE_MUTANTS=all`` tests all of them. The
``.equivalent.json`` files of tests/corpus/programs explain the survivors.
"""

import os

import numpy as np
import pytest

import tileweave as tw
from tests.corpus import PROGRAMS
from tileweave.simulator import Mutant

pytestmark = pytest.mark.long

FEW = ("ring_shift", "all_gather_loads", "gemm_reduce_scatter", "own_in_place", "two_producers",
       "ragged_dispatch", "ragged_tiles", "multimem_loads", "multimem_stores")  # fmt: skip
NAMES = tuple(PROGRAMS) if os.environ.get("TILEWEAVE_MUTANTS") == "all" else FEW
SCHEDULES = 5


def mutants(name: str) -> list[Mutant]:
    """Return all mutants of a program, in the smallest group in which every operation matters."""
    case = PROGRAMS[name]
    inputs = case.inputs(np.random.default_rng(0), case.mutated)
    return tw.mutate(case.called(case.mutated), case.mutated, inputs, SCHEDULES)


@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_accounted_for(name):
    actual = mutants(name)
    assert {m.op for m in actual if m.verdict == "killed"} >= {"signal", "wait_reached"}
    assert [(m.line, m.name, m.verdict, m.why) for m in actual if not m.is_accounted_for] == []
