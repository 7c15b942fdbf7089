"""Small faulty programs, each a known bug of this field, with its correct twin.

A case is one factory: ``make(True)`` is the faulty program and ``make(False)`` the correct one, so
that they differ only by what ``faulty`` touches. ``# FAULT`` marks the lines that a report about
the faulty one must name. All memory starts at zero, unless the case says otherwise. Importing a
theme registers its faults.
"""

from . import blocks, counters, fences, ll, memory, reuse, signals, transfers
from .case import EPOCHS, FAULTS, Case

__all__ = [
    "EPOCHS",
    "FAULTS",
    "Case",
    "blocks",
    "counters",
    "fences",
    "ll",
    "memory",
    "reuse",
    "signals",
    "transfers",
]
