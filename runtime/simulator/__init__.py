"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .errors import SimulationError, SimulationWarning
from .executable import Executable
from .mutation import Mutant, mutate
from .simulate import random_inputs, simulate

__all__ = [
    "Executable",
    "Mutant",
    "SimulationError",
    "SimulationWarning",
    "mutate",
    "random_inputs",
    "simulate",
]
