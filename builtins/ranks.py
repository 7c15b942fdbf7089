"""Rank of this process and number of ranks."""

from __future__ import annotations

from .declare import builtin
from .implicit import CONTEXT
from .spec import Int32, declaration_of

__all__ = ["rank", "world_size"]


@builtin()
def rank() -> Int32:
    """Rank of this process in the group, 0 to ``world_size() - 1``.

    A run-time value: one compiled kernel serves every rank. Bound by the host at each launch.
    """


@builtin()
def world_size() -> Int32:
    """Number of ranks in the group.

    A constant in programs compiled by ``tw.jit`` or ``tw.compile``; elsewhere a run-time value.
    """


RANK = declaration_of(rank).op_name
WORLD_SIZE = declaration_of(world_size).op_name

HOST_VALUES = frozenset({RANK, WORLD_SIZE, CONTEXT})
"""Operators whose value the host binds at each launch: the same for all threads."""
