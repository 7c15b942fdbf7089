"""Faults of packed rows that only their data shows: each is reported by kind and lines."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.releases import RECORDS_LINES
from tileweave import language as W

RANKS, ROWS, N, F32 = 2, 4, 4, "float32"


def make(blocks, at_once):
    """Return a program in which each rank sends the rows ``places`` to all ranks, pads two ranges
    of its own rows, and receives ``at_once`` rows at once."""

    @T.prim_func
    def program(
        sent: T.Tensor((1,), "int32"),
        places: T.Tensor((ROWS,), "int32"),
        pads: T.Tensor((2, 2), "int32"),
        used: T.Tensor((ROWS,), "int32"),
        Y: T.Tensor((ROWS, N), F32),
    ):
        with T.Kernel(blocks, threads=32) as block:
            inbox = W.alloc_packed(rows=ROWS, row=N)
            row = T.alloc_shared((1, N), F32)
            received = T.alloc_shared((at_once, N), F32)
            me = W.rank()
            if block == 0:
                T.fill(row, 1.0)
                for i in T.serial(sent[0]):
                    for peer in T.serial(RANKS):
                        T.copy(row, inbox[peer, places[i], 0])  # WRITE
                for i in T.serial(2):
                    W.pad(inbox[me, pads[i, 0], 0], pads[i, 1])  # PAD
            if block == blocks - 1:
                for step in T.serial(ROWS // at_once):
                    if used[step * at_once] >= 0:
                        T.copy(inbox[me, step * at_once, 0], received)
                        for i, j in T.Parallel(at_once, N):
                            Y[step * at_once + i, j] = T.if_then_else(  # USE
                                used[step * at_once + i] != 0, received[i, j], 0
                            )

    return program


def lines_of(*marks):
    text, first = inspect.getsourcelines(make)
    return {first + n for n, line in enumerate(text) if line.rstrip().endswith(marks)}


def simulate(form, places, pads=((2, 1), (3, 0)), used=(1, 1, 0, 1)):
    """Simulate schedules in which rank 0 writes ``places``, and rank 1 writes row 3."""
    inputs = [
        {
            "sent": np.array([len(rows)], np.int32),
            "places": np.array([*rows, *[0] * (ROWS - len(rows))], np.int32),
            "pads": np.array(pads if rank == 0 else ((2, 1), (3, 0)), np.int32),
            "used": np.array(used if rank == 0 else (1, 1, 0, 1), np.int32),
            "Y": np.zeros((ROWS, N), np.float32),
        }
        for rank, rows in enumerate((places, (3,)))
    ]
    return tw.simulate(FORMS[form], RANKS, inputs, schedules=6)


FORMS = {
    "one block": make(blocks=1, at_once=1),
    "two blocks": make(blocks=2, at_once=1),
    "tiles": make(blocks=2, at_once=2),
}
"""The second block receives, or all rows of a tile are read at once."""
FAULTS = {
    "row_written_twice": (
        {"places": (0, 1, 1)}, "race", ("# WRITE",), "the same launch has written before"
    ),
    "row_of_another_rank": (
        {"places": (0, 1, 3)}, "race", ("# WRITE",), "the same launch has written before"
    ),
    "padding_written": (
        {"places": (0, 1, 2)}, "race", ("# WRITE", "# PAD"),
        r"inbox\[[01]\], row 2 is written and padded in one launch",
    ),
    "padded_twice": (
        {"places": (0, 1), "pads": ((2, 1), (2, 1))}, "race", ("# PAD",),
        r"inbox\[0\], row 2 is padded twice in a launch",
    ),
    "row_missing": (
        {"places": (0,)}, "arrival", ("# PAD",),
        r"inbox\[[01]\]: 3 of 4 rows are written or padded in launch 0; row 1 is not",
    ),
    "padding_missing": (
        {"places": (0, 1), "pads": ((2, 0), (3, 0))}, "arrival", ("# PAD",),
        r"inbox\[0\]: 3 of 4 rows are written or padded in launch 0; row 2 is not",
    ),
    "capacity_exceeded": (
        {"places": (0, 1), "pads": ((2, 1), (5, -1))}, "bounds", ("# PAD",),
        r"inbox\[0\] has 4 rows; from row 5 on: W.pad of -1 rows by rank 0",
    ),
    "padding_above_the_capacity": (
        {"places": (0, 1), "pads": ((2, 1), (3, 2))}, "bounds", ("# PAD",), "W.pad of 2 rows"
    ),
    "padding_used": (
        {"places": (0, 1), "used": (1, 1, 1, 1)}, "poison", ("# USE",), "uninitialized"
    ),
}  # fmt: skip


FAULTS_OF_TILES = {
    # The row is not stored, and no counter of another tile counts it.
    "tile_not_read": (
        {"places": (0, 1), "used": (-1, -1, 0, 1)}, "arrival", (),
        r"inbox\[0\], row 0 is written in launch 0, and the owner reads no row of its tile",
    ),
    "row_above_the_capacity": (
        {"places": (0, 4)}, "arrival", ("# PAD",), "3 of 4 rows are written or padded"
    ),
}  # fmt: skip


def faults_of(form):
    return {**FAULTS, **FAULTS_OF_TILES} if form == "tiles" else FAULTS


@pytest.mark.parametrize(("form", "name"), [(f, name) for f in FORMS for name in faults_of(f)])
def test_is_reported(form, name):
    arguments, kind, marks, report = faults_of(form)[name]
    with pytest.raises(tw.SimulationError) as error:
        simulate(form, **arguments)
    fault = error.value
    assert fault.kind == kind, fault.report
    assert re.search(report, fault.report), fault.report
    if RECORDS_LINES:
        named = re.findall(rf"{re.escape(Path(__file__).name)}:(\d+)", fault.report)
        assert lines_of(*marks) <= set(map(int, named)), fault.report


@pytest.mark.parametrize("form", FORMS)
def test_twin_is_clean(form):
    for output in simulate(form, (1, 0)):
        assert np.array_equal(output["Y"], np.array([[1], [1], [0], [1]]) * np.ones((1, N)))


def test_rows_that_the_program_does_not_use_are_no_fault():
    @T.prim_func
    def program(X: T.Tensor((ROWS, N), F32), Y: T.Tensor((ROWS, N), F32)):
        with T.Kernel(1, threads=32):
            W.alloc_packed(rows=ROWS, row=N)
            T.copy(X, Y)

    inputs = [{"X": np.full((ROWS, N), rank, np.float32)} for rank in range(RANKS)]
    for rank, result in enumerate(tw.simulate(program, RANKS, inputs)):
        np.testing.assert_array_equal(result["Y"], inputs[rank]["X"])
