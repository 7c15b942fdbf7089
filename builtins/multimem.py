"""Multicast memory: one address refers to the same element on every GPU of a group.

The tensor must be mapped to a multicast object. A launch on a machine without multicast is refused.
float16 and bfloat16 are accessed as vectors of 2, 4 or 8; float32 also as vectors of 2 or 4.
"""

from __future__ import annotations

from typing import Any

from .atomics import ADD_TYPES, INTEGER_TYPES
from .declaration.declare import builtin
from .declaration.operands import buffer_of
from .declaration.qualifiers import MultimemOp, RedSem, Scope, StoreSem, WaitSem
from .errors import reject
from .spec import Constant, Element, Read, ReadWrite, Write
from .symmetric import is_scratch

__all__ = ["multimem_ld_reduce", "multimem_red", "multimem_st"]

_FAMILY = dict(types=ADD_TYPES, vectors=("f32", "f16x2", "bf16x2"), multicast=True, sm=90)
_BITWISE = {"and": INTEGER_TYPES, "or": INTEGER_TYPES, "xor": INTEGER_TYPES}
_LOAD_EXTREMA = dict.fromkeys(("min", "max"), (*INTEGER_TYPES, "f16x2", "bf16x2"))
_RED_EXTREMA = {"min": INTEGER_TYPES, "max": INTEGER_TYPES}


def _require_parameter(op: str, ref: Any) -> None:
    """Refuse ``W.alloc_symmetric`` memory, which has no multicast address."""
    buffer = buffer_of(ref)
    if is_scratch(buffer):
        problem = f"ref={buffer.name} is allocated by W.alloc_symmetric"
        raise reject(op, problem, "a parameter mapped to a multicast object")


@builtin(**_FAMILY, op_types=_BITWISE | _LOAD_EXTREMA)
def multimem_ld_reduce(
    ref: Read,
    lanes: Constant = 1,
    *,
    op: MultimemOp,
    scope: Scope = "sys",
    sem: WaitSem = "relaxed",
) -> Element:
    """Load an element, or ``lanes`` consecutive ones, from every GPU, and return their reduction.

    Sums of float16 and bfloat16 are accumulated in float32 and rounded once.

    Args:
        ref: the first element in a multicast tensor, aligned to the size of the access.
        lanes: 1, or a number of lanes that the type supports.
        op: operation that combines the values of the GPUs.
        scope: threads that may release the values.
        sem: ``acquire`` makes data visible that was released with the loaded values.

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
        ref: the first element in a multicast tensor, aligned to the size of the access.
        value: value of the element's type, or a vector that the type supports.
        scope: threads that may acquire the value.
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
        ref: the first element in a multicast tensor, aligned to the size of the access.
        value: value of the element's type, or a vector that the type supports.
        op: operation; floating-point types support only ``add``.
        scope: threads among which the operation is atomic.
        sem: ``release`` publishes what the block wrote before, as for ``red_add``.

    Needs: sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.red``.
    """
    _require_parameter("multimem_red", ref)
