"""Programs without explicit synchronization, each with inputs and the expected results.

They serve the simulator's tests, the tests on GPUs and the mutation tests. Importing a theme
registers its programs.
"""

from . import (
    collectives,
    dynamic,
    gathers,
    gemm,
    gemm_plans,
    loops,
    multimem,
    ragged,
    ragged_tiles,
    stencils,
)
from .case import PROGRAMS, Case

__all__ = [
    "PROGRAMS",
    "Case",
    "collectives",
    "dynamic",
    "gathers",
    "gemm",
    "gemm_plans",
    "loops",
    "multimem",
    "ragged",
    "ragged_tiles",
    "stencils",
]
