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
COUNTS = {
    "ring_shift": (42, 8),
    "all_gather_loads": (24, 7),
    "gemm_reduce_scatter": (26, 5),
    "gemm_reduce_add": (38, 7),
    "gemm_all_reduce": (41, 7),
    "all_to_all_transposed": (42, 8),
    "halo_exchange": (60, 5),
    "two_producers": (26, 7),
    "wide_reader": (40, 8),
    "persistent": (26, 5),
    "persistent_reduce_scatter": (26, 5),
    "all_gather_gemm": (35, 11),
    "copied_reduce_scatter": (50, 11),
    "recorded_reduce_scatter": (50, 13),
    "pulled_by_copies": (38, 11),
    "packed_gather": (40, 10),
    "scattered_loads": (40, 9),
    "two_shifts": (62, 8),
    "reduce_scatter_tails": (36, 9),
    "reduce_scatter_bulk": (33, 17),
    "own_in_place": (26, 5),
    "gather_k": (19, 4),
    "uneven_loops": (39, 8),
    "elementwise": (40, 10),
    "data_decides": (33, 7),
    "put_and_get": (50, 13),
    "bulk_transfers": (42, 15),
    "two_kernels": (84, 16),
    "dynamic_shift": (40, 8),
    "dynamic_gather": (24, 7),
    "dynamic_copies": (35, 11),
    "shift_again": (88, 13),
    "ring_all_reduce": (46, 5),
    "ring_gemm_reduce_scatter": (28, 5),
    "ring_in_place": (57, 5),
    "add_again": (71, 10),
    "persistent_in_place": (30, 8),
    "multimem_loads": (32, 8),
    "multimem_stores": (20, 7),
    "ragged_dispatch": (48, 8),
    "ragged_halves": (47, 10),
    "ragged_there_and_back": (81, 8),
    "ragged_of_a_neighbor": (42, 5),
    "ragged_tiles": (49, 8),
    "ragged_tile_results": (90, 13),
}
"""Mutants of each program that are killed, and explained."""


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
    verdicts = [m.verdict for m in actual]
    assert (verdicts.count("killed"), verdicts.count("explained")) == COUNTS[name]


def test_every_program_is_counted():
    assert COUNTS.keys() == PROGRAMS.keys()
