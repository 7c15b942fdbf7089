"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .errors import SimulationError, SimulationWarning
from .executable import Executable
from .simulate import random_inputs, simulate

__all__ = ["Executable", "SimulationError", "SimulationWarning", "random_inputs", "simulate"]
