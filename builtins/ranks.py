"""Rank of this process, and the number of ranks."""

from __future__ import annotations

from .declaration.declare import builtin
from .implicit import CONTEXT, LAUNCH
from .spec import Int32, declaration_of

__all__ = ["rank", "world_size"]


@builtin()
def rank() -> Int32:
    """Return the rank of this process in the group, 0 to ``world_size() - 1``.

    It is a run-time value that the host binds at each launch, so all ranks use the same compiled
    kernel.
    """


@builtin()
def world_size() -> Int32:
    """Return the number of ranks in the group.

    It is a constant in programs that ``tw.jit`` or ``tw.compile`` compiles, and a run-time value
    elsewhere.
    """


RANK = declaration_of(rank).op_name
WORLD_SIZE = declaration_of(world_size).op_name

HOST_VALUES = frozenset({RANK, WORLD_SIZE, CONTEXT, LAUNCH})
"""Operators whose value the host binds at each launch. The value is the same for all threads."""
