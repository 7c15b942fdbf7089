"""The device functions of all programs of this repository agree with the programs."""

from __future__ import annotations

import warnings

import pytest

import tileweave as tw
from tileweave.builtins.errors import LanguageError, SyncWarning

from .corpus import INSTANCES

ARCHITECTURES = ("sm_80", "sm_90a")
NEED_SM_90 = (
    "corpus:bulk_transfers", "corpus:reduce_scatter_tails", "corpus:reduce_scatter_bulk",
    "corpus:gemm_reduce_add", "bulk_copy.py:bulk_copy", "bulk_copy.py:multicast_program",
)  # fmt: skip
"""Programs that sm_80 refuses: they use the TMA, bulk copies or multimem operations."""
UNSUPPORTED = ("bulk_copy.py:multicast_program",)
"""Programs with multimem operations, which only the tile level simulates."""
WRONG = ("tutorial/04_simulate_a_bug.py",)
"""Programs that have a fault on purpose, which the compiler refuses."""
SHORT = (
    "corpus:ring_shift", "corpus:gemm_reduce_scatter", "corpus:bulk_transfers",
    "corpus:data_decides", "patterns/pipeline_parallel.py:example", "all_to_all:ldst",
    "corpus:ragged_halves", "all_gather:one_word",
)  # fmt: skip
"""Programs of ``make test``; ``make test-long`` validates all others."""


def validate(name: str, arch: str) -> None:
    program, ranks, inputs = INSTANCES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyncWarning)
        tw.validate(program, ranks, inputs, arch, resident_blocks=32)


def check(name: str, arch: str) -> None:
    """Validate a program, or check that it is refused or reported for the expected reason."""
    if arch == "sm_80" and name in NEED_SM_90:
        with pytest.raises(LanguageError, match="expected sm_90 or later"):
            validate(name, arch)
    elif name in WRONG:
        with pytest.raises(LanguageError, match="no signal follows it"):
            validate(name, arch)
    elif name in UNSUPPORTED:
        with pytest.raises(tw.SimulationError, match="is not simulated"):
            validate(name, arch)
    else:
        validate(name, arch)


def test_the_names_exist():
    assert {*NEED_SM_90, *UNSUPPORTED, *WRONG, *SHORT} <= set(INSTANCES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", SHORT)
def test_representative_programs(name, arch):
    check(name, arch)


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", [name for name in INSTANCES if name not in SHORT])
def test_every_program(name, arch):
    check(name, arch)
