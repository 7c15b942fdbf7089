"""Faults of ragged tensors that only their data shows: each is reported by kind and lines.

Wrong source indices, and announcements that are late, missing or repeated, are refused when the
program is compiled: see ``tests/corpus/refused/ragged.py``.
"""

import re

import numpy as np
import pytest
import tilelang.language as T

import tileweave as tw
from tests.factory import factory
from tests.lines import names_lines
from tileweave import language as W

RANKS, ROWS, N, F32 = 2, 3, 4, "float32"


@factory
def make(
    blocks,
    at_once,
    count: T.Tensor((1,), "int32"),
    sent: T.Tensor((1,), "int32"),
    places: T.Tensor((ROWS,), "int32"),
    Y: T.Tensor((RANKS, ROWS, N), F32),
    *,
    bulk=False,
):
    """Return a program in which each rank sends ``sent`` rows, at ``places``, to each segment, and
    receives ``at_once`` rows at once.

    Args:
        bulk: send by ``W.bulk_store``, which checks no address.
    """
    with T.Kernel(blocks, threads=32) as block:
        inbox = W.alloc_ragged((), rows=ROWS, row=N)
        tile = T.alloc_shared((1, N), F32)
        received = T.alloc_shared((at_once, N), F32)
        me = W.rank()
        T.fill(tile, 1.0)
        if block == 0:
            for peer in T.serial(RANKS):
                W.announce(inbox[peer, me, 0, 0], count[0])  # ANNOUNCE
                for i in T.serial(sent[0]):
                    if bulk:
                        W.bulk_store(inbox[peer, me, places[i], 0], tile, N)  # BULK
                        W.bulk_commit()
                        W.bulk_wait(0, read=True)
                    else:
                        T.copy(tile, inbox[peer, me, places[i], 0])  # WRITE
        if block == blocks - 1:
            for s in T.serial(RANKS):
                n = W.announced(inbox[me, s, 0, 0])
                for i in T.serial(T.ceildiv(n, at_once)):
                    T.copy(inbox[me, s, i * at_once, 0], received)  # READ
                    for r, j in T.Parallel(at_once, N):
                        if i * at_once + r < n:
                            Y[s, i * at_once + r, j] = received[r, j]


def simulate(form, count, places, faulty_rank=0):
    """Simulate schedules in which one rank announces ``count`` rows and writes ``places``."""
    inputs = []
    for rank in range(RANKS):
        rows, announced = (places, count) if rank == faulty_rank else ((1, 0), 2)
        inputs.append({
            "count": np.array([announced], np.int32),
            "sent": np.array([len(rows)], np.int32),
            "places": np.array([*rows, *[0] * (ROWS - len(rows))], np.int32),
            "Y": np.zeros((RANKS, ROWS, N), np.float32),
        })  # fmt: skip
    return tw.simulate(FORMS[form], RANKS, inputs, schedules=6)


FORMS = {
    "one block": make(blocks=1, at_once=1),
    "two blocks": make(blocks=2, at_once=1),
    "tiles": make(blocks=2, at_once=2),
    "bulk": make(blocks=2, at_once=1, bulk=True),
}
"""The second block receives, or all rows of a tile are read at once, or rows are bulk stores."""
FAULTS = {
    "row_written_twice": (2, (1, 1), "race", ("# WRITE",), r"the same launch has written before"),
    "count_too_small": (1, (0, 1), "arrival", ("# ANNOUNCE", "# WRITE"), "announced rows: 1;"),
    "count_too_large": (
        3, (0, 1), "arrival", ("# ANNOUNCE", "# WRITE"),
        r"inbox\[[01], 0\]: announced rows: 3; rows written so far: 2",
    ),
    "row_above_the_count": (2, (0, 2), "arrival", ("# ANNOUNCE", "# WRITE"), "highest row, 2,"),
    "capacity_exceeded": (4, (0, 1), "bounds", ("# ANNOUNCE",), "has 3 rows of capacity"),
    "negative_count": (-1, (), "bounds", ("# ANNOUNCE",), "announce of -1 rows by rank 0"),
    "nothing_written": (1, (), "arrival", ("# ANNOUNCE",), "announced rows: 1; .*so far: 0"),
}  # fmt: skip


FAULTS_OF_TILES = {
    # The tile of the announced row is read, and with it the other row, while it is written.
    "count_too_small": (1, (0, 1), "race", ("# READ", "# WRITE"), "is not ordered after"),
    # The row is not stored, and no counter of another segment counts it.
    "row_above_the_capacity": (2, (0, 3), "arrival", ("# ANNOUNCE",), "rows written so far: 1"),
}


FAULTS_IN_BULK = {
    # The row would be row 0 of the segment of the next rank.
    "segment_of_another_rank": (
        2, (0, 3), "bounds", ("# WRITE",), r"inbox\[[01], 1, 0, 3, 0\] of shape \(2, 2, 2, 3, 4\)"
    ),
}  # fmt: skip


def faults_of(form):
    more = {"tiles": FAULTS_OF_TILES, "bulk": FAULTS_IN_BULK}
    faults = {**FAULTS, **more.get(form, {})}
    if form != "bulk":
        return faults
    return {
        name: (*fault, tuple(mark.replace("WRITE", "BULK") for mark in marks), report)
        for name, (*fault, marks, report) in faults.items()
    }


@pytest.mark.parametrize(("form", "name"), [(f, name) for f in FORMS for name in faults_of(f)])
def test_is_reported(form, name):
    count, places, kind, marks, report = faults_of(form)[name]
    with pytest.raises(tw.SimulationError) as error:
        simulate(form, count, places)
    fault = error.value
    assert fault.kind == kind, fault.report
    assert re.search(report, fault.report), fault.report
    assert names_lines(fault.report, make, *marks), fault.report


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("places", [(), (0,), (1, 0), (2, 0, 1)])
def test_twin_is_clean(form, places):
    outputs = simulate(form, len(places), places)
    expected = np.zeros((RANKS, ROWS, N), np.float32)
    expected[0, : len(places)], expected[1, :2] = 1, 1
    for output in outputs:
        assert np.array_equal(output["Y"], expected)


def test_a_row_above_the_count_is_uninitialized():
    """The row was written by an earlier launch, which is why its value alone would look right."""

    @T.prim_func
    def program(count: T.Tensor((1,), "int32"), Y: T.Tensor((1, N), F32)):
        with T.Kernel(1, threads=32):
            inbox = W.alloc_ragged((), rows=ROWS, row=N)
            tile = T.alloc_shared((1, N), F32)
            me = W.rank()
            T.fill(tile, 1.0)
            W.announce(inbox[me, me, 0, 0], count[0])
            for i in T.serial(count[0]):
                T.copy(tile, inbox[me, me, i, 0])
            T.copy(inbox[me, me, 1, 0], tile)
            T.copy(tile, Y)

    inputs = [{"count": np.array([n], np.int32)} for n in (1, 2)]
    with pytest.raises(tw.SimulationError, match="uninitialized") as error:
        tw.simulate(program, 2, inputs)
    assert error.value.kind == "poison" and "rank 0" in error.value.report
