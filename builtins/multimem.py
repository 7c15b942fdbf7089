"""Multicast memory: one address that stands for the same element of every GPU of a group.

The tensor must be mapped to a multicast object. A launch on a machine without multicast is refused.
float16 and bfloat16 come as vectors of 2, 4 or 8, float32 also as vectors of 2 or 4.
"""

from __future__ import annotations

from typing import Any

from .atomics import ADD_TYPES, INTEGER_TYPES
from .declare import builtin
from .errors import reject
from .operands import buffer_of
from .qualifiers import MultimemOp, RedSem, Scope, StoreSem, WaitSem
from .spec import Constant, Element, Read, ReadWrite, Write
from .symmetric import is_scratch

__all__ = ["multimem_ld_reduce", "multimem_red", "multimem_st"]

_FAMILY = dict(types=ADD_TYPES, vectors="f32 f16x2 bf16x2", multicast=True, sm=90)
_BITWISE = {"and": INTEGER_TYPES, "or": INTEGER_TYPES, "xor": INTEGER_TYPES}
_LOAD_EXTREMA = {"min": f"{INTEGER_TYPES} f16x2 bf16x2", "max": f"{INTEGER_TYPES} f16x2 bf16x2"}
_RED_EXTREMA = {"min": INTEGER_TYPES, "max": INTEGER_TYPES}


def _require_parameter(op: str, ref: Any) -> None:
    """Refuse ``W.alloc_symmetric`` memory, which has no multicast address."""
    buffer = buffer_of(ref)
    if is_scratch(buffer):
        what = f"ref={buffer.name} is made by W.alloc_symmetric"
        raise reject(op, what, "a parameter mapped to a multicast object")


@builtin(**_FAMILY, op_types=_BITWISE | _LOAD_EXTREMA)
def multimem_ld_reduce(
    ref: Read,
    lanes: Constant = 1,
    *,
    op: MultimemOp,
    scope: Scope = "sys",
    sem: WaitSem = "relaxed",
) -> Element:
    """Load an element, or ``lanes`` consecutive ones, from every GPU, reduced on the way.

    Sums of float16 and bfloat16 are accumulated in float32 and rounded once.

    Args:
        ref: the first element of a multicast tensor, aligned to the whole size.
        lanes: 1, or as the type allows.
        op: how the GPUs' values are combined.
        scope: who may have released them.
        sem: ``acquire`` makes visible what was released with the values seen.

    Needs: sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.ld_reduce``.
    """
    _require_parameter("multimem_ld_reduce", ref)


@builtin(**_FAMILY)
def multimem_st(
    ref: Write, value: Element, *, scope: Scope = "sys", sem: StoreSem = "relaxed"
) -> None:
    """Store an element, or a vector of consecutive ones, on every GPU.

    Args:
        ref: the first element of a multicast tensor, aligned to the whole size.
        value: of the element's type, or a vector of it as the type allows.
        scope: who may acquire it.
        sem: ``release`` publishes what the block wrote before, as for ``st``.

    Needs: sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.st``.
    """
    _require_parameter("multimem_st", ref)


@builtin(**_FAMILY, op_types=_BITWISE | _RED_EXTREMA)
def multimem_red(
    ref: ReadWrite,
    value: Element,
    *,
    op: MultimemOp,
    scope: Scope = "sys",
    sem: RedSem = "relaxed",
) -> None:
    """Combine ``value`` into an element, or a vector into consecutive ones, on every GPU.

    Args:
        ref: the first element of a multicast tensor, aligned to the whole size.
        value: of the element's type, or a vector of it as the type allows.
        op: how; floating-point types are only added.
        scope: who takes part.
        sem: ``release`` publishes what the block wrote before, as for ``red_add``.

    Needs: sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.red``.
    """
    _require_parameter("multimem_red", ref)
