"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .explore.exhaustive import Exploration
from .frontend.debugger import Debugger
from .frontend.external import stand_in
from .inputs.default_inputs import INITIAL_ZEROS, described_inputs
from .machine.executable import Executable
from .mutation import Mutant, mutate
from .report.errors import SimulationError, SimulationWarning
from .simulate import LEVELS, executable_at, refused, simulate
from .validate import validate

__all__ = [
    "INITIAL_ZEROS",
    "LEVELS",
    "Debugger",
    "Executable",
    "Exploration",
    "Mutant",
    "SimulationError",
    "SimulationWarning",
    "described_inputs",
    "executable_at",
    "mutate",
    "refused",
    "simulate",
    "stand_in",
    "validate",
]


_REMOVED = {"random_inputs": "described_inputs(...)[0]"}
"""Removed names, and what to use instead. They are listed until the next release."""


def __getattr__(name: str):
    """Refuse a removed name."""
    instead = f"; expected {_REMOVED[name]}" if name in _REMOVED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
