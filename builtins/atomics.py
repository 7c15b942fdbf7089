"""Atomic operations on global memory, own or a peer's: ``atom_*`` return the old value, ``red_*``
nothing.

A pair (``float16x2``, ``bfloat16x2``) is an element of a tensor of that type, or a vector value at
an element of a float16 or bfloat16 tensor that is aligned to 4 bytes: ``W.red_add(S[i], x[0:2])``.
"""

from __future__ import annotations

from .declare import builtin
from .qualifiers import AtomSem, RedSem, Scope
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

ADD_TYPES = "u32 s32 u64 s64 f32 f64 f16x2 bf16x2"
INTEGER_TYPES = "u32 s32 u64 s64"
_ADD = dict(types=ADD_TYPES, type_sm={"bf16x2": 90})


@builtin(**_ADD, combines="add")
def atom_add(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Add ``value`` to an element in one indivisible step; the element as it was before.

    Each thread that reaches it does it once. With ``release`` or ``acq_rel`` the block meets first,
    and whoever acquires the new value sees what the block wrote before; with ``acquire`` or
    ``acq_rel`` what was released with the old value is visible afterwards.

    Args:
        ref: an element of a u32, s32, u64, s64, f32, f64, f16x2 or bf16x2 tensor in global memory.
        value: of the element's type. Pairs are added each by itself, subnormals kept.
        scope: who takes part; ``sys`` for another GPU or the host.
        sem: what it orders besides the element.

    Needs: sm_90 for bf16x2.

    Source: PTX ISA, ``atom``.
    """


@builtin(types=INTEGER_TYPES, combines="min")
def atom_min(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Lower an integer to ``value`` if that is less. Otherwise as ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="max")
def atom_max(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Raise an integer to ``value`` if that is greater. Otherwise as ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="and")
def atom_and(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Keep the bits of an integer that are set in ``value``. Otherwise as ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="or")
def atom_or(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Set the bits of an integer that are set in ``value``. Otherwise as ``atom_add``."""


@builtin(types=INTEGER_TYPES, combines="xor")
def atom_xor(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Flip the bits of an integer that are set in ``value``. Otherwise as ``atom_add``."""


@builtin(types=ADD_TYPES)
def atom_exch(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: AtomSem = "relaxed"
) -> Element:
    """Replace an element by ``value``. Otherwise as ``atom_add``; bf16x2 needs no sm_90."""


@builtin(types=ADD_TYPES, combines="cas")
def atom_cas(
    ref: ReadWrite,
    compare: Element,
    value: Element,
    *,
    scope: Scope = "gpu",
    sem: AtomSem = "relaxed",
) -> Element:
    """Replace an element by ``value`` if it equals ``compare``; the element as it was before.

    It equals bit for bit: 0.0 and -0.0 differ, and a NaN equals itself. Otherwise as ``atom_exch``.
    """


@builtin(**_ADD, combines="add")
def red_add(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Add ``value`` to an element in one indivisible step, without waiting for the old value.

    Otherwise as ``atom_add``. It cannot acquire, since it reads nothing the program could see.

    Source: PTX ISA, ``red``.
    """


@builtin(types=INTEGER_TYPES, combines="min")
def red_min(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Lower an integer to ``value`` if that is less. Otherwise as ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="max")
def red_max(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Raise an integer to ``value`` if that is greater. Otherwise as ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="and")
def red_and(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Keep the bits of an integer that are set in ``value``. Otherwise as ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="or")
def red_or(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Set the bits of an integer that are set in ``value``. Otherwise as ``red_add``."""


@builtin(types=INTEGER_TYPES, combines="xor")
def red_xor(
    ref: ReadWrite, value: Element, *, scope: Scope = "gpu", sem: RedSem = "relaxed"
) -> None:
    """Flip the bits of an integer that are set in ``value``. Otherwise as ``red_add``."""
