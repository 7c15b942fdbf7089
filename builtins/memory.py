"""Single loads, stores and fences with the scope and semantics of PTX's memory model.

Data and its flag may be one access: up to 128 bits arrive whole.
"""

from __future__ import annotations

from typing import Any

from tilelang import tvm
from tvm import tirx

from .declare import builtin
from .errors import reject
from .operands import buffer_of, element, ref_dtype
from .qualifiers import FenceSem, LoadSem, Scope, StoreSem
from .spec import Constant, Element, Read, Write, register_op

__all__ = ["fence", "fence_proxy_async", "ld", "st", "unordered"]

SCALAR_BITS = (8, 16, 32, 64)
VECTOR_BITS = (32, 64, 128)


def _check_width(op: str, ref: Any, value: Any = None, lanes: Any = 1) -> None:
    if not isinstance(lanes, int):
        return  # refused with the operands
    ref = element(op, "ref", ref, "global")
    kind = tvm.DataType(ref_dtype(ref, value))
    lanes *= kind.lanes
    if kind.bits * lanes not in (SCALAR_BITS if lanes == 1 else VECTOR_BITS):
        raise reject(
            op,
            f"{buffer_of(ref).name} of type {kind.with_lanes(1)}, {lanes} at a time, "
            f"is {kind.bits * lanes} bits",
            "an element of 8, 16, 32 or 64 bits, or a vector of 32, 64 or 128 bits",
        )


@builtin()
def ld(
    ref: Read, lanes: Constant = 1, *, scope: Scope = "gpu", sem: LoadSem = "acquire"
) -> Element:
    """Load an element, or ``lanes`` consecutive ones as a vector, in one piece.

    Each thread that reaches it loads. With ``acquire``, what was released with the value seen is
    visible afterwards to this thread.

    Args:
        ref: the first element, in global memory, aligned to the whole size.
        lanes: how many elements: 1 of 8 to 64 bits, or several that make 32, 64 or 128 bits.
        scope: who may have released it; ``sys`` for another GPU or the host. ``volatile`` has none.
        sem: ``relaxed`` orders nothing; ``volatile`` is ``relaxed`` at ``sys``, never elided.

    Source: PTX ISA, ``ld``.
    """
    _check_width("ld", ref, lanes=lanes)


@builtin()
def st(ref: Write, value: Element, *, scope: Scope = "gpu", sem: StoreSem = "relaxed") -> None:
    """Store an element, or the consecutive ones of a vector, in one piece.

    Each thread that reaches it stores. With ``release`` the block meets first, and whoever acquires
    the value sees what the block wrote before.

    Args:
        ref: the first element, in global memory, own or a peer's, aligned to the whole size.
        value: of the element's type, of 8 to 64 bits, or a vector of it of 32, 64 or 128 bits.
        scope: who may acquire it; ``sys`` for another GPU or the host.
        sem: ``relaxed`` publishes nothing but the value.

    Source: PTX ISA, ``st``.
    """
    _check_width("st", ref, value)


@builtin()
def fence(scope: Scope, sem: FenceSem = "acq_rel") -> None:
    """Order this thread's accesses before it against those after it, as seen by ``scope``.

    With a relaxed store or atomic after it, it releases; with a relaxed load before it, it
    acquires. It speaks for its own thread only. Bulk stores that thread issued are completed first.

    Args:
        scope: who must see the order.
        sem: ``sc`` also puts all such fences in one total order.

    Source: PTX ISA, ``fence``.
    """


@builtin(proxy_fence=True, sm=90)
def fence_proxy_async() -> None:
    """Make this thread's ordinary accesses and those of TMA and bulk copies see each other's order.

    In all state spaces. Needed between a wait and a TMA load of what was written by ordinary stores
    (put in by the compiler), and between ordinary stores and a TMA store of them.

    Needs: sm_90.

    Source: PTX ISA, ``fence.proxy.async``.
    """


UNORDERED = "tileweave.unordered"

register_op(UNORDERED, "marks an access in the next statement", 2)


def unordered(region: Any, *, reason: str) -> Any:
    """Return ``region``, for a read or write that the compiler does not order.

    No signal or wait is inferred for this access, and ``verify_sync`` does not check it. The
    program or its caller must ensure that no other thread or rank accesses the region meanwhile.
    ``tw.explain`` lists it with the reason::

        T.copy(W.unordered(S[peer, 0, 0], reason="written between launches only"), tile)

    Args:
        region: a tensor, an element or a region of it, as an operand of the statement it stands in.
        reason: why that is right, for those who read the program.

    Raises:
        LanguageError: no reason, or ``region`` is no part of a tensor.
    """
    if not isinstance(reason, str) or not reason.strip():
        raise reject("unordered", f"reason={reason!r}", "why no order is needed, in words")
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
    _put(tirx.call_intrin("handle", tvm.ir.Op.get(UNORDERED), start, tirx.StringImm(reason)))
    return region


def _put(call: tirx.PrimExpr) -> None:
    """``call`` as a statement before the one that is being traced."""
    from tilelang.language.eager.builder import Builder

    builder = Builder.current()
    if builder is None:
        raise reject("unordered", "stands outside a program", "a T.prim_func")
    builder.eval(call)
