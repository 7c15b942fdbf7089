"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .inputs.default_inputs import described_inputs, random_inputs
from .machine.executable import Executable
from .mutation import Mutant, mutate
from .report.errors import SimulationError, SimulationWarning
from .simulate import simulate

__all__ = [
    "Executable",
    "Mutant",
    "SimulationError",
    "SimulationWarning",
    "described_inputs",
    "mutate",
    "random_inputs",
    "simulate",
]
