"""Insert the signals and waits that accesses to symmetric tensors need."""

from __future__ import annotations

from tvm import tirx

from .inference import infer_and_explain


def infer_sync(func: tirx.PrimFunc, world_size: int, heap_stride: int) -> tirx.PrimFunc:
    """Synchronize a program that has no explicit synchronization between ranks.

    Three kinds of programs stay unchanged: programs with a system-scope signal, wait or barrier,
    programs that access no memory of other ranks, and programs with ``tileweave.verify`` off.

    Args:
        func: program that is specialized for the group.
        heap_stride: bytes between two ranks' heaps.

    Raises:
        LanguageError: an access cannot be ordered; names it and its line.

    Before: ``if owner != me: T.copy(tile, S[owner, ...]) else: T.copy(S[me, ...], tile)``
    After:  the same with signals and waits, and implicit parameters for their counters
    """
    return infer_and_explain(func, world_size, heap_stride)[0]
