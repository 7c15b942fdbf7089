"""The rank barrier on a stream."""

import tilelang.language as T
import torch

from ...builtins.barriers import sync_ranks
from ..host.session import Session, current
from .kernel import Kernel, compiled

_kernel: tuple[Session, Kernel] | None = None


def barrier(stream: torch.cuda.Stream | None = None) -> None:
    """Every rank's ``stream`` waits here for every other rank's. Collective; the host does not
    wait.

    Work queued before it on any rank is complete and visible to work queued after it on every rank.
    It is a kernel of one block, captured by CUDA graphs. After ``TILEWEAVE_TIMEOUT_S`` seconds
    without a peer it gives up, see ``tw.DeadlockError``.

    Args:
        stream: by default torch's current stream.
    """
    session = current()
    kernel = prepare(session)
    words = session.heap.view(0, (1,), torch.uint32)[session.group.rank]
    with torch.cuda.stream(stream):
        kernel(words)


def prepare(session: Session) -> Kernel:
    """The kernel of ``session``'s barrier; ``init`` compiles it, so that no call has to."""
    global _kernel
    if _kernel is None or _kernel[0] is not session:
        _kernel = (session, compiled(rank_barrier, {}, session))
    return _kernel[1]


@T.prim_func
def rank_barrier(words: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        sync_ranks()
