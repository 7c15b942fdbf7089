"""The soak program draws all operators, and reports a wrong result with what reproduces it."""

from __future__ import annotations

import re

from tests.gpu.soak import LAUNCHES
from tests.ops import soak_on_ranks
from tests.ops.soak_on_ranks import OPERATORS

VISITS = 40
WITHOUT_OUT = {"dispatch", "expert_mlp"}


def test_all_operators_are_drawn_and_right(three):
    for result in three.run(soak_on_ranks.visits, 6, VISITS):
        assert not isinstance(result, Exception), result
        launches, wrong, names, said = result
        assert (launches, wrong, said) == (VISITS * LAUNCHES, 0, "")
        assert names == {*OPERATORS, *WITHOUT_OUT}


def test_one_wrong_element_is_reported(three):
    """It is the last element of a result on rank 1."""
    results = three.run(soak_on_ranks.visits, 3, 2, 1)
    assert [wrong for _, wrong, *_ in results] == [0, 1, 0]
    match = re.search(
        r"soak: WRONG: seed 3, visit 0, problem \d+: \w+ .*, back to back: rank 1, launch 0, "
        r"result: first wrong element (\d+) is (-?\d+), expected (-?\d+)\n",
        results[1][-1],
    )
    assert match is not None, results[1][-1]
    assert int(match[1]) >= 0 and int(match[2]) == int(match[3]) + 1
    assert results[0][-1] == results[2][-1] == ""
