"""Names of builtin calls in messages. The name of an inserted call says what it is inserted for."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from ...builtins.spec import builtin_of

ORIGIN = "tileweave.origin"
"""Annotation of an inserted call with its name, which names the access that needs it."""
COUNT = "the count of launches that the compiler inserts"
"""Name of the operations of ``passes.sync.infer.epochs``."""
_KINDS = {"read": "read of", "write": "write of", "add": "addition to"}


def insertion_annotations(role: str, kind: str = "", tensor: str = "") -> dict[str, tirx.StringImm]:
    """Return the annotations of a call that the compiler inserts.

    Args:
        role: ``wait``, ``signal``, ...
        kind: kind of the access that needs the call: ``read``, ``write`` or ``add``.
        tensor: name of the accessed tensor.
    """
    access = f" for the {_KINDS[kind]} {tensor}" if kind else ""
    return {ORIGIN: tirx.StringImm(f"the {role} that the compiler inserts{access}")}


def without_origins(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` without origins, for printing: only messages need them."""

    def plain(call: tirx.Call) -> tirx.Call | None:
        if ORIGIN not in call.annotations:
            return None
        annotations = {key: v for key, v in call.annotations.items() if key != ORIGIN}
        return tirx.Call(call.dtype, call.op, call.args, annotations)

    return func.with_body(ir_transform(func.body, None, plain, ["tirx.Call"]))


def name_of(call: tirx.Call) -> str:
    """Return the name of ``call`` for messages: the builtin's name, or the origin if inserted."""
    origin = call.annotations.get(ORIGIN)
    return builtin_of(call).name if origin is None else str(origin.value)


def tensor_of(call: tirx.Call) -> str | None:
    """Return the tensor whose access needs the inserted ``call``; None if it may be any tensor."""
    _, separator, access = name_of(call).partition(" inserts for the ")
    kind = next((text for text in _KINDS.values() if access.startswith(f"{text} ")), None)
    return access.removeprefix(f"{kind} ") if separator and kind else None


def hint_of(call: tirx.Call) -> str:
    """Return a hint for the end of a message: the access to move instead of an inserted call."""
    _, separator, access = name_of(call).partition(" inserts for ")
    return f" (the compiler keeps it beside {access}, which you can move)" if separator else ""
