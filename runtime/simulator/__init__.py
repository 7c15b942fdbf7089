"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .default_inputs import described_inputs, random_inputs
from .errors import SimulationError, SimulationWarning
from .executable import Executable
from .mutation import Mutant, mutate
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
