"""Flags between ranks: signal after a write of data, and wait before a read of it.

A flag is an ordinary u32, s32, u64 or s64 element, usually of a symmetric tensor. It is a counter
(``add``, ``wait_reached``, ``wait_ge``) or a value (``set``, ``wait_eq``).
"""

from __future__ import annotations

from .declaration.declare import builtin
from .declaration.qualifiers import Scope, SignalOp, SignalSem, WaitSem
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

FLAG_TYPES = ("u32", "s32", "u64", "s64")
WATCHED = ("context", "loc")
"""Implicit operands of a wait that can time out."""


@builtin(types=FLAG_TYPES, level="leader", barrier_before=True)
def signal(
    ref: ReadWrite,
    value: Element = 1,
    *,
    op: SignalOp = "add",
    scope: Scope = "sys",
    sem: SignalSem = "release",
) -> None:
    """Publish the writes of the block, then change a flag once.

    All threads of the block synchronize, and their bulk and TMA stores complete. Then one thread
    adds ``value`` to the flag or sets it. A thread on any rank that observes the new value by an
    acquiring wait of sufficient scope sees everything that the block wrote before.

    Under a condition on the thread index (``if T.get_thread_binding() == 0``), each thread that
    reaches the call signals. The block then synchronizes before the condition. The compiler assumes
    that a condition on a value in global memory is the same for all threads of the block: no thread
    may change the value at the same time.

    Args:
        ref: the flag, an element of a u32, s32, u64 or s64 tensor in global memory of this rank or
            a peer.
        value: value to add or set.
        op: ``add`` (atomic) or ``set``, for flags with one writer.
        scope: threads that wait for the flag; ``sys`` includes other GPUs and the host.
        sem: ``relaxed`` publishes only the flag.

    Source: PTX ISA, ``red`` and ``st``; memory consistency model, release patterns.
    """


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="eq")
def wait_eq(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until the flag equals ``value``. Data that was published with it is then visible.

    Every thread that reaches the call polls. So it may be used anywhere: in a branch, in
    ``T.Pipelined``, in a producer or a consumer warp. It also orders TMA loads that follow. After
    ``TILEWEAVE_TIMEOUT_S`` seconds the wait fails: the process reports kernel, line, flag, observed
    value and expected value, and raises ``tw.DeadlockError``.

    Args:
        ref: the flag, an element of a u32, s32, u64 or s64 tensor in global memory.
        value: value to compare with.
        peer: rank that should signal, for the report; -1 if unknown.
        scope: at least the scope of the signal; ``sys`` includes other GPUs and the host.
        sem: ``relaxed`` orders no later access.

    Source: PTX ISA, ``ld.acquire``; memory consistency model, acquire patterns.
    """


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="ne")
def wait_ne(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until the flag differs from ``value``. Otherwise like ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="ge")
def wait_ge(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until the flag is at least ``value``. Otherwise like ``wait_eq``.

    Use ``wait_reached`` for counters that may wrap around.
    """


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="gt")
def wait_gt(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until the flag is greater than ``value``. Otherwise like ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="le")
def wait_le(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until the flag is at most ``value``. Otherwise like ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="lt")
def wait_lt(
    ref: Flag, value: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until the flag is less than ``value``. Otherwise like ``wait_eq``."""


@builtin(types=FLAG_TYPES, implicit=WATCHED, waits="reached")
def wait_reached(
    ref: Flag, target: Element, peer: Int32 = -1, *, scope: Scope = "sys", sem: WaitSem = "acquire"
) -> None:
    """Wait until a counter has reached ``target``, even if the counter wraps around.

    The wait compares the signed difference, so a counter needs no reset. Its distance to the target
    must stay below half of its range. Otherwise like ``wait_eq``.
    """
