"""The rank barrier on a stream."""

import tilelang.language as T
import torch

from ...builtins.barriers import sync_ranks
from ..host.session import Session, current
from .kernel import Kernel, compiled

_kernel: tuple[Session, Kernel] | None = None


def barrier(stream: torch.cuda.Stream | None = None) -> None:
    """Let ``stream`` of each rank wait for ``stream`` of all ranks. Collective; the host does not
    wait.

    Work enqueued before the barrier on any rank is complete and visible to work enqueued after it
    on all ranks. The barrier is a kernel of one block, and CUDA graphs can capture it. It times out
    after ``TILEWEAVE_TIMEOUT_S`` seconds without a peer; see ``tw.DeadlockError``.

    Args:
        stream: by default torch's current stream.
    """
    session = current()
    kernel = prepare(session)
    words = session.heap.view(0, (1,), torch.uint32)[session.group.rank]
    with torch.cuda.stream(stream):
        kernel(words)


def prepare(session: Session) -> Kernel:
    """Return the kernel of ``session``'s barrier; ``init`` is the first caller and compiles it."""
    global _kernel
    if _kernel is None or _kernel[0] is not session:
        _kernel = (session, compiled(rank_barrier, {}, session))
    return _kernel[1]


@T.prim_func
def rank_barrier(words: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        sync_ranks()
