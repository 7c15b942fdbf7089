"""Ordinary programs at random: all that ``emit`` accepts is right at the device level.

A program is right, or refused in words with a line. To see one that fails, with its smallest
form: ``python -m tests.generated.minimize FAMILY SEED ARCH``.
"""

from collections import Counter
from pathlib import Path

import pytest

from .check import ARCHITECTURES, check
from .programs import FAMILIES, NEED_SM_90, random_program

QUICK = 8
"""Programs of each family in ``make test``."""
CHUNKS, CHUNK = 11, 12
"""``make test-long`` tests this number of groups of programs of each family: 1,188 in all."""


def faults(family: str, seeds: range, folder: Path) -> list[str]:
    """Return the faults of programs; odd seeds are for sm_80 if it runs the family."""
    outcomes, lines = Counter(), []
    for seed in seeds:
        program = random_program(family, seed)
        file = folder / f"{family}_{seed}.py"
        file.write_text(program.text)
        arch = ARCHITECTURES[0 if family in NEED_SM_90 else seed % len(ARCHITECTURES)]
        verdict = check(file, program.ranks, arch, reference=program.reference)
        outcomes[verdict.outcome] += 1
        if verdict.is_fault:
            fault = f"{verdict.outcome}: {verdict.why}"
            lines.append(f"{family} {seed} {arch}: {fault}\n{program.text}")
    assert outcomes["right"], f"no program of {seeds} is right: {outcomes}"
    return lines


@pytest.mark.parametrize("family", FAMILIES)
def test_programs(family, tmp_path):
    assert faults(family, range(QUICK), tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_programs(family, chunk, tmp_path):
    first = QUICK + chunk * CHUNK
    assert faults(family, range(first, first + CHUNK), tmp_path) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_do_not_change(family):
    """A seed is the name of a program."""
    assert random_program(family, 3) == random_program(family, 3)
    assert random_program(family, 3) != random_program(family, 4)
