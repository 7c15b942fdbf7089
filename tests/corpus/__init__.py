"""Correct, faulty and refused programs that tests parametrize over, split by theme."""

from .faults import FAULTS
from .programs import PROGRAMS
from .refused import REFUSED

__all__ = ["FAULTS", "PROGRAMS", "REFUSED"]
