"""Programs and faulty programs that tests parametrize over, split by theme."""

from .faults import FAULTS
from .programs import PROGRAMS

__all__ = ["FAULTS", "PROGRAMS"]
