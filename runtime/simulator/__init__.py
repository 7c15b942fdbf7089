"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .errors import SimulationError
from .program import Program
from .simulate import random_inputs, simulate

__all__ = ["Program", "SimulationError", "random_inputs", "simulate"]
