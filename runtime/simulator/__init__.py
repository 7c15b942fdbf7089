"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .errors import SimulationError
from .executable import Executable
from .simulate import random_inputs, simulate

__all__ = ["Executable", "SimulationError", "random_inputs", "simulate"]
