"""The explicit way out: an access that the compiler shall neither order nor judge."""

from __future__ import annotations

from typing import Any

from tilelang import tvm
from tvm import tirx

from .declare import register_op
from .errors import reject

UNORDERED = "tileweave.unordered"

register_op(UNORDERED, "marks an access in the next statement", 2)


def unordered(region: Any, *, reason: str) -> Any:
    """``region`` itself, read or written without any order.

    No signal or wait is inferred for this access, and ``verify_sync`` does not judge it; the
    program, or whoever launches it, sees to it that nobody else touches the region meanwhile.
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
