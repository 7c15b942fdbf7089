"""Atomic operations on global memory of this rank or of a peer.

``atom_*`` return the old value; ``red_*`` return nothing.

A pair (``float16x2``, ``bfloat16x2``) is an element of a tensor of that type, or a vector value at
an element of a float16 or bfloat16 tensor that is aligned to 4 bytes: ``W.red_add(S[i], x[0:2])``.
"""

from __future__ import annotations

from .declaration.declare import builtin
from .declaration.qualifiers import AtomSem, RedSem, Scope
from .spec import Element, ReadWrite

__all__ = [
    "atom_add",
    "atom_and",
    "atom_cas",
    "atom_exch",
    "atom_max",
    "atom_min",
    "atom_or",
    "atom_xor",
    "red_add",
    "red_and",
    "red_max",
    "red_min",
    "red_or",
    "red_xor",
]

INTEGER_TYPES = ("u32", "s32", "u64", "s64")
ADD_TYPES = (*INTEGER_TYPES, "f32", "f64", "f16x2", "bf16x2")
_ADD = dict(types=ADD_TYPES, type_sm={"bf16x2": 90})


@builtin(**_ADD, combines="add")
def atom_add(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Add ``value`` to an element atomically and return the old value.

    Each thread that reaches the call executes it once. With ``release`` or ``acq_rel`` all threads
    of the block synchronize first, and a thread that acquires the new value sees what the block
    wrote before. With ``acquire`` or ``acq_rel``, data that was released with the old value is
    visible afterwards.

    Args:
        ref: an element of a u32, s32, u64, s64, f32, f64, f16x2 or bf16x2 tensor in global memory.
        value: value of the element's type. The halves of a pair are added separately; subnormals
            are kept.
        scope: threads among which the operation is atomic; ``sys`` includes other GPUs and the
            host.
        sem: order of other memory accesses; ``relaxed`` orders none.

    Needs: sm_90 for bf16x2.

    Source: PTX ISA, ``atom``.
    """


@builtin(types=INTEGER_TYPES, combines="min")
def atom_min(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Lower an integer to ``value`` if ``value`` is less. Otherwise like ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="max")
def atom_max(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Raise an integer to ``value`` if ``value`` is greater. Otherwise like ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="and")
def atom_and(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Keep the bits of an integer that are set in ``value``. Otherwise like ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="or")
def atom_or(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Set the bits of an integer that are set in ``value``. Otherwise like ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="xor")
def atom_xor(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Flip the bits of an integer that are set in ``value``. Otherwise like ``atom_add``."""


@builtin(types=ADD_TYPES)
def atom_exch(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Replace an element by ``value``. Otherwise like ``atom_add``; bf16x2 needs no sm_90."""


@builtin(types=ADD_TYPES, combines="cas")
def atom_cas(
    ref: ReadWrite,
    compare: Element,
    value: Element,
    *,
    scope: Scope = "gpu",
    sem: AtomSem = "relaxed",
) -> Element:
    """Replace an element by ``value`` if it equals ``compare``, and return the old value.

    Bits are compared: 0.0 and -0.0 differ, and a NaN equals itself. Otherwise like ``atom_exch``.
    """


@builtin(**_ADD, combines="add")
def red_add(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Add ``value`` to an element atomically, without waiting for the old value.

    It cannot acquire, because it returns no value. Otherwise like ``atom_add``.

    Source: PTX ISA, ``red``.
    """


@builtin(types=INTEGER_TYPES, combines="min")
def red_min(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Lower an integer to ``value`` if ``value`` is less. Otherwise like ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="max")
def red_max(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Raise an integer to ``value`` if ``value`` is greater. Otherwise like ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="and")
def red_and(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Keep the bits of an integer that are set in ``value``. Otherwise like ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="or")
def red_or(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Set the bits of an integer that are set in ``value``. Otherwise like ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="xor")
def red_xor(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Flip the bits of an integer that are set in ``value``. Otherwise like ``red_add``."""
