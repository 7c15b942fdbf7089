"""One published bug of the zoo, and the registry of all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.factory import factory

from ..faults.case import Case, Expected, from_left

Change = Callable[[Any], Any]
"""Edit of a device function."""

LEVELS = ("refused", "tile", "device", "missed")


@dataclass(frozen=True, kw_only=True)
class Specimen(Case):
    """A published bug as a small program, its correct twin, and the expected report.

    ``# FAULT`` marks the lines that the report of ``level`` must name.

    Args:
        bug: ``owner/repo#number``.
        what: what went wrong there, in one sentence.
        level: what finds it first: ``refused`` by the compiler, or reported by the simulator of
            the ``tile`` or the ``device`` level. ``missed``: nothing finds it.
        change: edit of the device function of the faulty program, for faults that the compiler
            excludes in every program.
    """

    bug: str
    what: str
    level: str
    change: Change | None = None


ZOO: dict[str, Specimen] = {}


def specimen(
    bug: str,
    what: str,
    level: str,
    kinds: str,
    report: str,
    expected: Expected = from_left,
    **more: Any,
):
    """Register the factory below as a published bug; ``kinds`` are separated by spaces.

    A fault of the corpus that is the bug has its name in ``more``.
    """
    assert level in LEVELS, level

    def register(make):
        make = factory(make)
        fields = {"name": make.__name__, "source": make, "expected": expected, **more}
        ZOO[fields["name"]] = Specimen(
            make=make, kinds=tuple(kinds.split()), report=report, bug=bug, what=what, level=level,
            **fields,
        )  # fmt: skip
        return make

    return register
