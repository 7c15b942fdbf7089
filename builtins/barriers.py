"""Barriers wider than a block. All are reusable without reset, and all time out like waits.

Each stands at tile level, where the whole block reaches it. Under a condition on the thread index
one thread must be certain, such as ``if T.get_thread_binding() == 0``: several threads would each
arrive, so the compiler refuses them. Without a ``barrier`` argument they
count in words that the runtime keeps for the process: two kernels that use these must then not run
at the same time on one GPU. Words of your own lift that:

- They are zero on every rank before the first barrier.
- Only barriers change them, and leave them ready for the next one. A kernel that zeroes them again
  runs before or after all kernels, of any rank, that use them.
- Kernels use them one after another, never side by side.
- Barriers that begin at the same word may share them. Otherwise words of barriers do not overlap.

The compiler refuses what it knows to be otherwise. The simulator reports the rest.
"""

from __future__ import annotations

from typing import Any

from .declare import builtin
from .errors import reject
from .operands import element
from .spec import OptionalReadWrite
from .symmetric import is_symmetric

__all__ = ["barrier_blocks", "sync_grid", "sync_ranks"]

_AT = dict(
    implicit=("context", "loc"),
    level="leader",
    barrier_before=True,
    barrier_after=True,
)


def words_of(participants: str, ranks: int) -> int:
    """Return the number of 32-bit words that a barrier counts in.

    One counts blocks; a barrier of ranks has one more for its calls and one for the arrivals of
    each rank.
    """
    return 1 if participants == "grid" else 2 + ranks


def _check_words(op: str, barrier: Any, across_ranks: bool) -> None:
    if barrier is None:
        return
    buffer = element(op, "barrier", barrier, "global").buffer
    if str(buffer.dtype) != "uint32":
        raise reject(op, f"barrier={buffer.name} has type {buffer.dtype}", "type uint32")
    if across_ranks and not is_symmetric(buffer):
        raise reject(
            op,
            f"barrier={buffer.name} is no symmetric tensor",
            "this rank's copy of a W.Symmetric tensor, such as B[W.rank(), 0]",
        )


@builtin(**_AT, participants="grid")
def sync_grid(barrier: OptionalReadWrite = None) -> None:
    """Every block of this launch waits for every other; what any wrote is then visible to all.

    All blocks must be resident at once (grid no larger than SMs x blocks per SM), else it times
    out.

    Args:
        barrier: one zeroed u32 in global memory, or None for the process's own.
    """
    _check_words("sync_grid", barrier, across_ranks=False)


@builtin(**_AT, participants="ranks")
def sync_ranks(barrier: OptionalReadWrite = None) -> None:
    """One block of each rank waits for that block of every other rank.

    What any of them wrote or had seen, at any rank, is then visible to all. To be reached by
    exactly one block a launch, on every rank.

    Args:
        barrier: this rank's copy of the first of ``2 + world_size`` zeroed u32 of a symmetric
            tensor, such as ``B[W.rank(), 0]``, or None for the process's own.
    """
    _check_words("sync_ranks", barrier, across_ranks=True)


@builtin(**_AT, participants="blocks")
def barrier_blocks(barrier: OptionalReadWrite = None) -> None:
    """Every block of every rank waits for all the others: ``sync_grid`` across the group.

    All blocks must be resident at once on each rank.

    Args:
        barrier: as for ``sync_ranks``.
    """
    _check_words("barrier_blocks", barrier, across_ranks=True)
