"""The rank barrier on a stream."""

from typing import Any

import tilelang.language as T
import torch

from ...builtins.barriers import sync_ranks
from ...builtins.errors import brief_errors
from ..host.session import Session, current
from .kernel import Kernel, compile_kernel

_kernels: dict[str, tuple[Session, Kernel]] = {}
"""Name of a session -> the session and the kernel of its barrier."""


@brief_errors
def barrier(stream: torch.cuda.Stream | None = None, group: Any = None) -> None:
    """Let ``stream`` of each rank wait for ``stream`` of all ranks of a group. Collective; the host
    does not wait.

    Work enqueued before the barrier on any rank is complete and visible to work enqueued after it
    on all ranks. The barrier is a kernel of one block, and CUDA graphs can capture it. It times out
    after ``TILEWEAVE_TIMEOUT_S`` seconds without a peer; see ``tw.DeadlockError``.

    Args:
        stream: by default torch's current stream.
        group: ranks that wait: None for the default group, a ``ProcessGroup``, its name, or a
            ``DeviceMesh`` with one axis.
    """
    barrier_in(current(group), stream)


def barrier_in(session: Session, stream: torch.cuda.Stream | None = None) -> None:
    """Enqueue the barrier of ``session``'s group; see ``barrier``."""
    kernel = prepare(session)
    words = session.heap.view(0, (1,), torch.uint32)[session.group.rank]
    with torch.cuda.stream(stream):
        kernel(words)


def prepare(session: Session) -> Kernel:
    """Return the kernel of ``session``'s barrier; ``init`` is the first caller and compiles it."""
    owner, kernel = _kernels.get(session.name, (None, None))
    if kernel is None or owner is not session:
        kernel = compile_kernel(rank_barrier, {}, session)
        _kernels[session.name] = session, kernel
    return kernel


@T.prim_func
def rank_barrier(words: T.Tensor((1,), "uint32")):
    with T.Kernel(1, threads=32) as _:
        sync_ranks()
