"""Flags between ranks: signal after a write of data, and wait before a read of it.

A flag is an ordinary u32, s32, u64 or s64 element, usually of a symmetric tensor. It is a counter
(``add``, ``wait_reached``, ``wait_ge``) or a value (``set``, ``wait_eq``).

In the LL protocol (NCCL's term) each piece of data has its own flag. A word is an element of a
uint64 tensor: the data is its lower half, the flag its upper half. A reader polls until the flag is
the expected one, and then has the data. So a message needs no signal, no fence and no barrier of
the block, but twice its memory and its bytes on the link.

PTX allows this: "Conflicting morally strong operations are performed with single-copy atomicity"
(PTX ISA, memory consistency model, Atomicity). A vector access is "a set of equivalent memory
operations with a scalar data type, executed in an unspecified order" (Memory Operations on Vector
Data Types). So two words are accessed as ``v2.b64``, which are two atomic operations of 8 bytes;
NCCL's ``v4.u32`` would be four of 4 bytes, with no order between a flag and its data.
"""

from __future__ import annotations

from typing import Any

from tilelang import tvm
from tvm import tirx

from .declare import builtin
from .errors import reject
from .operands import WORD_DATA_BITS, buffer_of, element
from .qualifiers import Scope, SignalOp, SignalSem, WaitSem
from .spec import Constant, Data, DtypeName, Element, Int32, Read, ReadWrite, Uint32, Write
from .spec import Read as Flag

__all__ = [
    "ll_ld",
    "ll_st",
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


WORD = "uint64"
"""Element type of a tensor of words."""


def _require_words(op: str, ref: Any) -> None:
    buffer = buffer_of(element(op, "ref", ref, "global"))
    if str(buffer.dtype) != WORD:
        raise reject(op, f"{buffer.name} has type {buffer.dtype}", "a tensor of uint64 words")


@builtin(flagged=True)
def ll_st(ref: Write, value: Data, flag: Uint32, *, scope: Scope = "sys") -> None:
    """Store data together with a flag: in one word, or in two consecutive words by one access.

    Each thread that reaches the call stores. A thread that observes the flag in a word by ``ll_ld``
    has the data of this word. Nothing else becomes visible with it: not the other word, and not
    what the thread wrote before. A word must not be stored again before its reader has read it.

    Args:
        ref: the first word, an element of a uint64 tensor in global memory of this rank or a peer;
            two words are aligned to 16 bytes.
        value: 4 bytes for one word, or 8 bytes for two: a scalar or a vector of any type.
        flag: differs from the flag that the word has, such as the number of the launch.
        scope: threads that load the word; ``sys`` includes other GPUs and the host.

    Source: PTX ISA, ``st.relaxed`` with ``v2.b64``; memory consistency model, Atomicity and Memory
    Operations on Vector Data Types.
    """
    _require_words("ll_st", ref)
    if isinstance(value, tirx.PrimExpr):
        dtype = tvm.DataType(str(value.dtype))
        if dtype.bits * dtype.lanes not in (WORD_DATA_BITS, 2 * WORD_DATA_BITS):
            raise reject("ll_st", f"value has type {dtype}", "a scalar or vector of 4 or 8 bytes")


@builtin(flagged=True, implicit=WATCHED)
def ll_ld(
    ref: Read,
    flag: Uint32,
    peer: Int32 = -1,
    words: Constant = 1,
    *,
    dtype: DtypeName = "uint32",
    scope: Scope = "sys",
) -> Data:
    """Poll one word, or two consecutive words, until each has the flag; return their data.

    Every thread that reaches the call polls, with one access for both words. After
    ``TILEWEAVE_TIMEOUT_S`` seconds the poll fails as a wait does: the process reports kernel, line,
    word, observed flag and expected flag, and raises ``tw.DeadlockError``. The load orders no other
    access.

    Args:
        ref: the first word, an element of a uint64 tensor in global memory; two words are aligned
            to 16 bytes.
        flag: the flag that ``ll_st`` stores.
        peer: rank that should store, for the report; -1 if unknown.
        words: 1 or 2.
        dtype: element type of the result, of 1, 2, 4 or 8 bytes. The data of all words is one
            element or a vector: two words of bfloat16 are a ``bfloat16x4``.
        scope: at least the scope of the store; ``sys`` includes other GPUs and the host.

    Source: PTX ISA, ``ld.relaxed`` with ``v2.b64``; memory consistency model, Atomicity and Memory
    Operations on Vector Data Types.
    """
    _require_words("ll_ld", ref)
    if words not in (1, 2):
        raise reject("ll_ld", f"words={words!r}", "1 or 2")
    bits = tvm.DataType(dtype).bits
    if bits not in (8, 16, 32, 64) or bits > words * WORD_DATA_BITS:
        legal = "a type of at most 4 bytes, or of 8 bytes for two words"
        raise reject("ll_ld", f"dtype={dtype!r}, words={words}", legal)
