"""The faulty programs and their correct twins are programs that TileLang takes."""

import pytest

import tileweave as tw

from .faults import CASES

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_compiles(case):
    """The simulator is not asked about programs that TileLang would refuse."""
    for faulty in (True, False):
        assert "__global__" in tw.emit(case.make(faulty), stage="cuda", world_size=case.ranks)
