"""The simulator reports each faulty program by kind and line; its correct twin is clean and right.

The long run: ``TILEWEAVE_SCHEDULES=1000 pytest tests/simulator/faults/test_faults.py``.
"""

import os
import re

import numpy as np
import pytest

import tileweave as tw
from tests.corpus import FAULTS
from tests.corpus.faults import EPOCHS, Case

SCHEDULES = int(os.environ.get("TILEWEAVE_SCHEDULES", "50"))
every_case = pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)


def simulate(case: Case, faulty: bool) -> list[dict[str, np.ndarray]]:
    program = case.make(faulty)
    return tw.simulate(
        program,
        world_size=case.ranks,
        inputs=case.inputs(program),
        schedules=SCHEDULES,
        seed=0,
        epochs=EPOCHS,
        resident_blocks=4,
    )


FIRST = {case.source: name for name, case in reversed(FAULTS.items())}
"""One fault of each program; the others differ in constants."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if FIRST[case.source] == name else pytest.mark.long)
        for name, case in FAULTS.items()
    ],
)
def test_compiles(case):
    """TileLang compiles all programs that the simulator is tested with."""
    for faulty in (True, False):
        off = {"tileweave.verify": "off"} if faulty else {}
        program = case.make(faulty)
        emitted = tw.emit(program, stage="cuda", world_size=case.ranks, pass_configs=off)
        assert "__global__" in emitted


@every_case
def test_is_reported(case):
    with pytest.raises(tw.SimulationError) as error:
        simulate(case, faulty=True)
    fault = error.value
    assert fault.kind in case.kinds, fault.report
    assert re.search(case.report, fault.report), fault.report
    assert case.lines and case.lines <= case.lines_in(fault.report), (case.lines, fault.report)


@pytest.mark.long
@every_case
def test_twin_is_clean(case):
    outputs = simulate(case, faulty=False)
    for rank in range(case.ranks):
        for name, expected in case.expected(EPOCHS - 1, rank, case.ranks).items():
            np.testing.assert_array_equal(outputs[rank][name], expected, f"{name} of rank {rank}")
