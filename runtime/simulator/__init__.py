"""Runs the programs of W ranks on the CPU, with weak memory, and explains their faults."""

from .errors import SimulationError
from .program import Program
from .simulate import simulate

__all__ = ["Program", "SimulationError", "simulate"]
