"""The LL protocol (NCCL's term): words of 4 bytes of data and a 4-byte flag, in one access.

A word is an element of a uint64 tensor: the data is its lower half. A reader polls until the flag
is the expected one, and then has the data. So a message needs no signal, no fence and no barrier of
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

from .declaration.declare import builtin
from .declaration.operands import WORD_DATA_BITS, buffer_of, element
from .declaration.qualifiers import Scope
from .errors import reject
from .signals import WATCHED
from .spec import Constant, Data, DtypeName, Int32, Read, Uint32, Write

__all__ = ["ll_ld", "ll_st"]

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
        flag: a value that the word does not hold yet, such as the number of the launch; with the
            old value, the reader returns old data.
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
