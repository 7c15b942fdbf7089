"""Flags between ranks: signal after the data is written, wait before it is read.

A flag is an ordinary u32, s32, u64 or s64 element, usually of a symmetric tensor. It is a counter
(``add``, ``wait_reached``, ``wait_ge``) or a word (``set``, ``wait_eq``).
"""

from __future__ import annotations

from .declare import builtin
from .qualifiers import Scope, SignalOp, SignalSem, WaitSem
from .spec import Element, Int32, ReadWrite
from .spec import Read as Flag

__all__ = [
    "signal",
    "wait_eq",
    "wait_ge",
    "wait_gt",
    "wait_le",
    "wait_lt",
    "wait_ne",
    "wait_reached",
]

FLAG_TYPES = "u32 s32 u64 s64"
WATCHED = ("context", "loc")


@builtin(types=FLAG_TYPES, level="leader", barrier_before=True)
def signal(
    ref: ReadWrite,
    value: Element = 1,
    *,
    op: SignalOp = "add",
    scope: Scope = "sys",
    sem: SignalSem = "release",
) -> None:
    """Publish what the block wrote so far, then change a flag once.

    All threads of the block meet, bulk and TMA stores they issued are completed (not merely read),
    then one thread adds ``value`` to the flag or sets it. Whoever sees the new value with an
    acquiring wait of sufficient scope sees everything the block wrote before, at any rank. Under a
    condition on the thread index (``if T.get_thread_binding() == 0``) each thread that reaches it
    signals; the meeting is then placed before the condition. A condition on what stands in global
    memory is taken to be the same for the whole block: no thread may change it meanwhile.

    Args:
        ref: the flag, an element of a u32, s32, u64 or s64 tensor in global memory, own or a
            peer's.
        value: what to add or set.
        op: ``add`` (atomic) or ``set``. ``set`` is for flags with one writer.
        scope: who waits for it; ``sys`` for another GPU or the host.
        sem: ``relaxed`` publishes nothing but the flag.

    Source: PTX ISA, ``red`` and ``st``; memory consistency model, release patterns.
    """


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="eq")
def wait_eq(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until the flag equals ``value``; then what was published with it is visible.

    Every thread that reaches it polls, so it may stand anywhere: in a branch, in ``T.Pipelined``,
    in a producer or a consumer warp. Data that a TMA load reads afterwards is ordered too. After
    ``TILEWEAVE_TIMEOUT_S`` seconds the wait gives up: the process reports kernel, line, flag, value
    seen and value expected, and raises ``tw.DeadlockError``.

    Args:
        ref: the flag, an element of a u32, s32, u64 or s64 tensor in global memory.
        value: what to compare with.
        peer: the rank expected to signal, named in the report; -1 if unknown.
        scope: at least the scope of the signal; ``sys`` for another GPU or the host.
        sem: ``relaxed`` orders nothing after it.

    Source: PTX ISA, ``ld.acquire``; memory consistency model, acquire patterns.
    """


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="ne")
def wait_ne(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until the flag differs from ``value``. Otherwise as ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="ge")
def wait_ge(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until the flag is at least ``value``. Otherwise as ``wait_eq``.

    For counters that may wrap around use ``wait_reached``.
    """


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="gt")
def wait_gt(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until the flag is greater than ``value``. Otherwise as ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="le")
def wait_le(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until the flag is at most ``value``. Otherwise as ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="lt")
def wait_lt(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until the flag is less than ``value``. Otherwise as ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="reached")
def wait_reached(
    ref: Flag, target: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Stand until a counter has reached ``target``, also across wrap-around.

    Compares the signed difference, so a counter that is never reset serves for ever as long as it
    is less than half its range away from the target. Otherwise as ``wait_eq``.
    """
