"""Builtin calls as statements, for passes that insert them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilelang import language as T
from tilelang import tvm
from tvm import tirx

from ....builtins import atomics, ll, memory, ragged, signals
from ....builtins.implicit import CONTEXT, Loc, register_loc
from ....builtins.spec import declaration_of
from ...ir.origin import insertion_annotations
from ..regions.accesses import Access


def signal(
    flag: tirx.BufferLoad, value: tirx.PrimExpr, access: Access | None = None, scope: str = "sys"
) -> tirx.Stmt:
    """Build ``W.signal(flag, value, scope=scope)`` for ``access``, or for the whole launch."""
    return _call(
        signals.signal, T.access_ptr(flag, "rw"), value,
        qualifiers=("u32", "add", scope, "release"), origin=_origin("signal", access),
    )  # fmt: skip


def wait_reached(
    flag: tirx.BufferLoad, target: tirx.PrimExpr, peer: tirx.PrimExpr, access: Access,
    scope: str = "sys",
) -> tirx.Stmt:  # fmt: skip
    """Build ``W.wait_reached(flag, target, peer, scope=scope)`` for ``access``."""
    watched = _watched(
        signals.wait_reached, f"{flag} before {access.op}, inferred", access.line, "uint32"
    )
    return _call(
        signals.wait_reached, T.access_ptr(flag, "r"), target, peer, *watched,
        qualifiers=("u32", scope, "acquire"), origin=_origin("wait", access),
    )  # fmt: skip


def check_row(
    element: tirx.BufferLoad, words: tirx.BufferLoad, written: tirx.BufferLoad,
    numbers: Sequence[int | tirx.PrimExpr], access: Access,
) -> tirx.Stmt:  # fmt: skip
    """Build ``W.check_row`` for ``access``; ``numbers`` are its operands from ``row`` on."""
    *integers, launch = numbers
    pointers = (T.access_ptr(element, "r"), T.access_ptr(words, "rw"), T.access_ptr(written, "rw"))
    operands = [*pointers, *(tirx.convert(n) for n in integers), launch]
    return _checked(ragged.check_row, operands, element, access)


def check_amount(
    element: tirx.BufferLoad, written: tirx.BufferLoad, total: tirx.BufferLoad, tiles: int,
    access: Access,
) -> tirx.Stmt:  # fmt: skip
    """Build ``W.check_amount`` for a segment; ``access`` is a write to the tensor."""
    pointers = [T.access_ptr(ref, "r") for ref in (element, written, total)]
    operands = [*pointers, tirx.IntImm("int32", tiles)]
    return _checked(ragged.check_amount, operands, element, access)


def _checked(
    builtin: Callable[..., tirx.PrimExpr], operands: list, element: tirx.BufferLoad, access: Access
) -> tirx.Stmt:
    watched = _watched(builtin, f"{element}", access.line)
    return _call(builtin, *operands, *watched, qualifiers=(), origin=_origin("check", access))


def atomic_add(word: tirx.BufferLoad, value: int) -> tirx.PrimExpr:
    """Build ``W.atom_add(word, value, scope="gpu", sem="acq_rel")``."""
    operands = (T.access_ptr(word, "rw"), tirx.const(value, "uint32"))
    return _expression("uint32", atomics.atom_add, *operands, qualifiers=("u32", "gpu", "acq_rel"))


def load(word: tirx.BufferLoad) -> tirx.PrimExpr:
    """Build ``W.ld(word, sem="relaxed")``."""
    return _expression(
        "uint32", memory.ld, T.access_ptr(word, "r"), tirx.IntImm("int32", 1),
        qualifiers=("gpu", "relaxed"),
    )  # fmt: skip


def store(word: tirx.BufferLoad, value: tirx.PrimExpr) -> tirx.Stmt:
    """Build ``W.st(word, value)``."""
    return _call(memory.st, T.access_ptr(word, "w"), value, qualifiers=("gpu", "relaxed"))


def ll_store(
    word: tirx.BufferLoad, value: tirx.PrimExpr, flag: tirx.PrimExpr, tensor: str
) -> tirx.Stmt:
    """Build ``W.ll_st(word, value, flag)`` for a write of ``tensor``."""
    return _call(
        ll.ll_st, T.access_ptr(word, "w"), value, flag, qualifiers=("sys",),
        origin=insertion_annotations("store of words", "write", tensor),
    )  # fmt: skip


def ll_load(
    word: tirx.BufferLoad, flag: tirx.PrimExpr, dtype: str, words: int, line: str
) -> tirx.PrimExpr:
    """Build ``W.ll_ld(word, flag, words=words)`` for a read on ``line``."""
    watched = _watched(ll.ll_ld, f"{word}, inferred", line, "uint32")
    return _expression(
        dtype, ll.ll_ld, T.access_ptr(word, "r"), flag, tirx.IntImm("int32", -1),
        tirx.IntImm("int32", words), *watched, qualifiers=("sys",),
        origin=insertion_annotations("poll of words", "read", word.buffer.name),
    )  # fmt: skip


def _expression(
    dtype: str,
    builtin: Callable[..., tirx.PrimExpr],
    *operands,
    qualifiers,
    origin: dict | None = None,
) -> tirx.PrimExpr:
    strings = [tirx.StringImm(q) for q in qualifiers]
    call = tirx.call_intrin(dtype, declaration_of(builtin).op, *operands, *strings)
    origin = insertion_annotations("count of launches") if origin is None else origin
    return tirx.Call(call.dtype, call.op, call.args, origin)


def _call(
    builtin: Callable[..., tirx.PrimExpr], *operands, qualifiers, origin: dict | None = None
) -> tirx.Stmt:
    return tirx.Evaluate(
        _expression("handle", builtin, *operands, qualifiers=qualifiers, origin=origin)
    )


def _origin(role: str, access: Access | None) -> dict:
    if access is None:
        return insertion_annotations(role)
    return insertion_annotations(role, access.kind, access.tensor.name)


def _watched(
    builtin: Callable[..., tirx.PrimExpr], text: str, line: str, dtype: str = ""
) -> tuple[tirx.PrimExpr, tirx.IntImm]:
    """Return the operands of a builtin that may give up: the context, and the registered source
    location, whose number the device reports."""
    file, _, number = line.rpartition(":")
    loc = Loc(builtin.__name__, text, file, int(number or 0), dtype, inferred=True)
    return tirx.call_intrin("int64", tvm.ir.Op.get(CONTEXT)), register_loc(loc)
