"""Barriers of several blocks. They need no reset between uses, and they time out like waits.

Call a barrier where the whole block reaches it. Under a condition on the thread index, exactly one
thread may reach it, as with ``if T.get_thread_binding() == 0``. Several threads would each arrive,
so the compiler refuses them.

Without the argument ``barrier``, a barrier counts in 32-bit words that the runtime keeps for the
process. Two kernels that use these words must not run at the same time on one GPU. Words of the
program's own remove this restriction, under these rules:

- They are zero on every rank before the first barrier.
- Only barriers change them, and leave them ready for the next one. A kernel that zeroes them again
  runs before or after all kernels, of any rank, that use them.
- Kernels that use them never run at the same time.
- Barriers that begin at the same word may share words. Words of other barriers do not overlap.

The compiler refuses violations that it can prove. The simulator reports the others.
"""

from __future__ import annotations

from typing import Any

from .declaration.declare import builtin
from .declaration.operands import element
from .errors import reject
from .spec import OptionalReadWrite
from .symmetric import is_symmetric

__all__ = ["barrier_blocks", "sync_grid", "sync_ranks"]

_ROLES = dict(
    implicit=("context", "loc"),
    level="leader",
    barrier_before=True,
    barrier_after=True,
)


def words_of(participants: str, ranks: int) -> int:
    """Return the number of 32-bit words that a barrier counts in.

    One word counts blocks. A barrier of ranks has another word for its calls, and one for the
    arrivals of each rank.
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
            f"barrier={buffer.name} is not a symmetric tensor",
            "this rank's copy of a W.Symmetric tensor, such as B[W.rank(), 0]",
        )


@builtin(**_ROLES, participants="grid")
def sync_grid(barrier: OptionalReadWrite = None) -> None:
    """Wait until all blocks of this launch arrive. Their earlier writes are then visible to all.

    All blocks must be resident at the same time: the grid must not exceed SMs x blocks per SM.
    Otherwise the barrier times out.

    Args:
        barrier: one zeroed u32 in global memory, or None for the word of the process.
    """
    _check_words("sync_grid", barrier, across_ranks=False)


@builtin(**_ROLES, participants="ranks")
def sync_ranks(barrier: OptionalReadWrite = None) -> None:
    """Wait until one block of each rank arrives.

    What any of these blocks wrote or observed before is then visible to all of them. On every rank,
    exactly one block in each launch must reach the call with the same ``barrier``. Blocks that pass
    different words do not meet.

    Args:
        barrier: the first of ``2 + world_size`` zeroed u32 in this rank's copy of a symmetric
            tensor, such as ``B[W.rank(), 0]``; None for the words of the process.
    """
    _check_words("sync_ranks", barrier, across_ranks=True)


@builtin(**_ROLES, participants="blocks")
def barrier_blocks(barrier: OptionalReadWrite = None) -> None:
    """Wait until all blocks of all ranks arrive: ``sync_grid`` across the group.

    All blocks of each rank must be resident at the same time.

    Args:
        barrier: the same as for ``sync_ranks``.
    """
    _check_words("barrier_blocks", barrier, across_ranks=True)
