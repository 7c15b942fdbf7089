"""Races between threads of one block are reported; their twins and correct programs are clean."""

import numpy as np
import pytest

import tileweave as tw
from tests.corpus.faults.case import zeros_of
from tests.corpus.threads import CLEAN, RACES, places
from tests.lines import names_lines


def simulate(program):
    inputs = {
        name: np.arange(zeros.size, dtype=zeros.dtype).reshape(zeros.shape) * (name != "ready")
        for name, zeros in zeros_of(program).items()
    }
    return tw.simulate(program, 1, [inputs], schedules=3, epochs=1)


@pytest.mark.parametrize("name", RACES)
def test_a_race_in_the_block_is_reported(name):
    with pytest.raises(tw.SimulationError) as error:
        simulate(RACES[name](True))
    assert error.value.kind in ("race", "reuse"), error.value.report
    assert names_lines(error.value.report, RACES[name], "# FAULT"), error.value.report


@pytest.mark.parametrize("name", RACES)
def test_the_twin_is_clean(name):
    simulate(RACES[name](False))


def test_the_value_of_the_active_point_is_stored():
    (outputs,) = simulate(places.one_point_stores(False))
    assert outputs["out"][0] == 3


@pytest.mark.parametrize("name", CLEAN)
def test_a_correct_program_is_clean(name):
    program = CLEAN[name]()
    tw.simulate(program, 1, [zeros_of(program)], schedules=3, epochs=2)
