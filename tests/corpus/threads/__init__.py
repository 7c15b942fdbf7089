"""Races in memory between threads of one block, each with a correct twin.

Importing a theme registers its programs.
"""

from . import barriers, places
from .case import CLEAN, RACES

__all__ = ["CLEAN", "RACES", "barriers", "places"]
