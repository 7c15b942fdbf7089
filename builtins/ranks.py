"""Rank of this process, the number of ranks, and values that are equal on all ranks."""

from __future__ import annotations

from .declaration.declare import builtin
from .implicit import CONTEXT, LAUNCH
from .spec import Int32, declaration_of

__all__ = ["rank", "rank_uniform", "world_size"]


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


@builtin(uniform=True)
def rank_uniform(value: Int32) -> Int32:
    """Return ``value``, which the program promises to be equal in all blocks of all ranks.

    The inference cannot know a number that a kernel loads, such as the number of valid rows. If
    ``index < W.rank_uniform(...)`` guards all writes and reads of a tensor of
    ``W.alloc_symmetric``, the inference inserts signals and waits under the same condition. The
    number may differ between launches. Ranks with different values wait for data that no rank
    sends, until the wait times out. ``tw.simulate`` reports different values.

    Args:
        value: an int32, the same in all blocks of a launch on all ranks of the group.
    """


RANK = declaration_of(rank).op_name
WORLD_SIZE = declaration_of(world_size).op_name

HOST_VALUES = frozenset({RANK, WORLD_SIZE, CONTEXT, LAUNCH})
"""Operators whose value the host binds at each launch. The value is the same for all threads."""
