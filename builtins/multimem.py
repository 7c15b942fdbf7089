"""Multicast memory: one operation accesses the same element on every GPU of a group.

``S[:, i]`` is this element in all copies of a symmetric tensor. Symmetric tensors have no multicast
address: the compiler replaces the operation by an access to each copy, on machines with and without
multicast. Relaxed loads, stores and additions become ordinary accesses and ``T.atomic_add``, which
the inference or the program's signals order. The others become ``W.ld``, ``W.st`` and ``W.red_*``.

Any other tensor must be mapped to a multicast object. Without multicast the launch is refused. Only
such tensors always need sm_90; a symmetric tensor needs what the replacing accesses need.

float16 and bfloat16 are accessed as vectors of 2, 4 or 8; float32 also as vectors of 2 or 4.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from .atomics import ADD_TYPES, INTEGER_TYPES
from .declaration.declare import builtin
from .declaration.operands import buffer_of
from .declaration.qualifiers import MultimemOp, RedSem, Scope, StoreSem, WaitSem
from .errors import reject
from .spec import Constant, Element, Read, ReadWrite, Write
from .symmetric import is_symmetric, ragged_axes

__all__ = ["multimem_ld_reduce", "multimem_red", "multimem_st"]

_FAMILY = dict(types=ADD_TYPES, vectors=("f32", "f16x2", "bf16x2"), multicast=True, sm=90)
_BITWISE = {"and": INTEGER_TYPES, "or": INTEGER_TYPES, "xor": INTEGER_TYPES}
_LOAD_EXTREMA = dict.fromkeys(("min", "max"), (*INTEGER_TYPES, "f16x2", "bf16x2"))
_RED_EXTREMA = {"min": INTEGER_TYPES, "max": INTEGER_TYPES}


def _require_all_copies(op: str, ref: Any) -> None:
    """Refuse an element of one rank's copy of a symmetric tensor."""
    buffer = buffer_of(ref)
    if not is_symmetric(buffer) or isinstance(ref, tirx.Buffer):
        return
    if ragged_axes(buffer):
        raise reject(op, f"ref={buffer.name} is ragged", "another symmetric tensor")
    ranks = ref.region[0] if isinstance(ref, tirx.BufferRegion) else None
    if ranks is None or not (_is_zero(ranks.min) and ranks.extent.same_as(buffer.shape[0])):
        problem = f"ref={buffer.name} is symmetric, and an index selects ranks"
        raise reject(op, problem, f"the copies of all ranks, {buffer.name}[:, ...]")


def _is_zero(index: tirx.PrimExpr) -> bool:
    return isinstance(index, tirx.IntImm) and int(index) == 0


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

    Sums of float16 and bfloat16 are accumulated in float32 and rounded once. Copies of a symmetric
    tensor are combined in the order of the ranks, so all ranks receive the same bits.

    Args:
        ref: the first element, ``S[:, i]`` of a symmetric tensor or an element of a multicast
            tensor, aligned to the size of the access.
        lanes: 1, or a number of lanes that the type supports.
        op: operation that combines the values of the GPUs.
        scope: threads that may release the values.
        sem: ``acquire`` makes data visible that was released with the loaded values.

    Needs: for a multicast tensor sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.ld_reduce``.
    """
    _require_all_copies("multimem_ld_reduce", ref)


@builtin(**_FAMILY)
def multimem_st(
    ref: Write, value: Element, *, scope: Scope = "sys", sem: StoreSem = "relaxed"
) -> None:
    """Store an element, or a vector of consecutive ones, on every GPU.

    Args:
        ref: the first element, ``S[:, i]`` of a symmetric tensor or an element of a multicast
            tensor, aligned to the size of the access.
        value: value of the element's type, or a vector that the type supports.
        scope: threads that may acquire the value.
        sem: ``release`` publishes what the block wrote before, as for ``st``.

    Needs: for a multicast tensor sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.st``.
    """
    _require_all_copies("multimem_st", ref)


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
        ref: the first element, ``S[:, i]`` of a symmetric tensor or an element of a multicast
            tensor, aligned to the size of the access.
        value: value of the element's type, or a vector that the type supports.
        op: operation; floating-point types support only ``add``.
        scope: threads among which the operation is atomic.
        sem: ``release`` publishes what the block wrote before, as for ``red_add``.

    Needs: for a multicast tensor sm_90, NVLink switches with multicast.

    Source: PTX ISA, ``multimem.red``.
    """
    _require_all_copies("multimem_red", ref)
