"""Single loads, stores, prefetches and fences with the scope and semantics of PTX's memory model.

An access of up to 128 bits is never torn, so it can hold data together with its flag.
"""

from __future__ import annotations

from typing import Any

from tilelang import tvm
from tvm import tirx

from .declaration.declare import builtin
from .declaration.operands import buffer_of, element, ref_dtype
from .declaration.qualifiers import FenceSem, LoadSem, Scope, StoreSem
from .errors import reject
from .spec import Constant, Element, Read, Write, register_op

__all__ = ["fence", "fence_proxy_async", "ld", "prefetch", "st", "unordered"]

SCALAR_BITS = (8, 16, 32, 64)
VECTOR_BITS = (32, 64, 128)


def _check_width(op: str, ref: Any, value: Any = None, lanes: Any = 1) -> None:
    if not isinstance(lanes, int):
        return  # refused with the operands
    ref = element(op, "ref", ref, "global")
    dtype = tvm.DataType(ref_dtype(ref, value))
    lanes *= dtype.lanes
    if dtype.bits * lanes not in (SCALAR_BITS if lanes == 1 else VECTOR_BITS):
        raise reject(
            op,
            f"{buffer_of(ref).name} has type {dtype.with_lanes(1)}, and an access of {lanes} "
            f"lane{'s' * (lanes != 1)} has {dtype.bits * lanes} bits",
            "an element of 8, 16, 32 or 64 bits, or a vector of 32, 64 or 128 bits",
        )


@builtin()
def ld(
    ref: Read, lanes: Constant = 1, *, scope: Scope = "gpu", sem: LoadSem = "acquire"
) -> Element:
    """Load an element, or ``lanes`` consecutive ones as a vector, in a single access.

    Each thread that reaches the call loads. With ``acquire``, data that was released with the
    loaded value is visible to this thread afterwards.

    Args:
        ref: the first element, in global memory, aligned to the size of the access.
        lanes: number of elements: 1 of 8 to 64 bits, or several of 32, 64 or 128 bits together.
        scope: threads that may release the value; ``sys`` includes other GPUs and the host.
            ``volatile`` has no scope.
        sem: ``relaxed`` orders nothing; ``volatile`` is ``relaxed`` at ``sys``, never elided.

    Source: PTX ISA, ``ld``.
    """
    _check_width("ld", ref, lanes=lanes)


@builtin()
def st(ref: Write, value: Element, *, scope: Scope = "gpu", sem: StoreSem = "relaxed") -> None:
    """Store an element, or the consecutive elements of a vector, in a single access.

    Each thread that reaches the call stores. With ``release`` all threads of the block synchronize
    first, and a thread that acquires the value sees what the block wrote before.

    Args:
        ref: the first element, in global memory of this rank or a peer, aligned to the size of the
            access.
        value: value of the element's type, of 8 to 64 bits, or a vector of 32, 64 or 128 bits.
        scope: threads that may acquire the value; ``sys`` includes other GPUs and the host.
        sem: ``relaxed`` publishes only the value.

    Source: PTX ISA, ``st``.
    """
    _check_width("st", ref, value)


@builtin(no_effect=True)
def prefetch(ref: Read) -> None:
    """Fetch the cache line of an element into the L2 cache.

    Each thread that reaches the call fetches the line of its element. Only the time of later
    accesses changes: the call orders nothing, and the compiler infers no wait for it.

    Args:
        ref: an element in global memory.

    Source: PTX ISA, ``prefetch``.
    """


@builtin()
def fence(scope: Scope, sem: FenceSem = "acq_rel") -> None:
    """Order the earlier accesses of this thread before its later ones, as seen by ``scope``.

    A fence and a relaxed store or atomic operation after it are a release; a relaxed load and a
    fence after it are an acquire. The fence orders only the accesses of its own thread. It first
    waits until bulk stores of the thread are complete.

    Args:
        scope: threads that observe the order.
        sem: ``sc`` also puts all ``sc`` fences in one total order.

    Source: PTX ISA, ``fence``.
    """


@builtin(proxy_fence=True, sm=90)
def fence_proxy_async() -> None:
    """Order this thread's ordinary accesses with those of TMA and bulk copies.

    The fence covers all state spaces. The compiler inserts it between a wait and a TMA load of data
    from ordinary stores. The program needs it between ordinary stores and a TMA store of their
    data.

    Needs: sm_90.

    Source: PTX ISA, ``fence.proxy.async``.
    """


UNORDERED = "tileweave.unordered"

register_op(UNORDERED, "marks an access in the next statement", 2)


def unordered(region: Any, *, reason: str) -> Any:
    """Return ``region``, for a read or write that the compiler does not order.

    No signal or wait is inferred for this access, and the verification ignores it. The program
    or its caller must ensure that no other thread or rank accesses the region meanwhile.
    ``tw.explain`` lists it with the reason::

        T.copy(W.unordered(S[peer, 0, 0], reason="written between launches only"), tile)

    Args:
        region: a tensor, an element or a region of it, as an operand of the enclosing statement.
        reason: why no order is needed, for readers of the program.

    Raises:
        LanguageError: ``reason`` is empty, or ``region`` is not part of a tensor.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise reject("unordered", f"reason={reason!r}", "a text that says why no order is needed")
    if isinstance(region, tirx.Buffer):
        start = tirx.BufferLoad(region, [0] * len(region.shape))
    elif isinstance(region, tirx.BufferRegion):
        start = tirx.BufferLoad(region.buffer, [r.min for r in region.region])
    elif isinstance(region, tirx.BufferLoad):
        start = region
    else:
        raise reject("unordered", f"region={region!r}", "a tensor, or a part such as S[peer, 0]")
    if start.buffer.scope().startswith(("shared", "local")):
        name, scope = start.buffer.name, start.buffer.scope()
        raise reject("unordered", f"{name} is in {scope} memory", "a tensor in global memory")
    _emit(tirx.call_intrin("handle", tvm.ir.Op.get(UNORDERED), start, tirx.StringImm(reason)))
    return region


def _emit(call: tirx.PrimExpr) -> None:
    """Add ``call`` as a statement before the traced one."""
    from tilelang.language.eager.builder import Builder

    builder = Builder.current()
    if builder is None:
        raise reject("unordered", "called outside a program", "a call in a T.prim_func")
    builder.eval(call)
