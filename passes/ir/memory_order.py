"""Effects of builtins on the order of memory, according to their declarations and qualifiers."""

from __future__ import annotations

from tvm import tirx

from ...builtins.spec import Pointer, builtin_of
from .walk import op_name


def releases(call: tirx.Call) -> bool:
    """Return whether ``call`` is a builtin that publishes earlier writes."""
    spec = builtin_of(call)
    if spec is None:
        return False
    return bool(spec.participants) or _sem(call) in ("release", "acq_rel", "sc")


def acquires(call: tirx.Call) -> bool:
    """Return whether ``call`` is a builtin that makes published writes visible."""
    spec = builtin_of(call)
    if spec is None:
        return False
    return bool(spec.participants) or _sem(call) in ("acquire", "acq_rel", "sc")


def _sem(call: tirx.Call) -> str:
    spec = builtin_of(call)
    return spec.qualifier(call, "sem") if spec.has_qualifier("sem") else ""


def writes(call: tirx.Call) -> bool:
    """Return whether ``call`` is a builtin that changes memory, so that it must not be repeated."""
    spec = builtin_of(call)
    return spec is not None and spec.writes


def may_signal(call: tirx.Call) -> bool:
    """Return whether ``call`` may end a wait: a builtin that changes global memory, or an atomic
    operation of TileLang."""
    if builtin_of(call) is None:
        return op_name(call).startswith("tl.atomic_")
    return any(pointer.buffer.scope() == "global" for pointer in pointers_written(call))


def pointers_written(call: tirx.Call) -> list[tirx.BufferLoad]:
    """Return the first element in each of the program's tensors that ``call`` writes."""
    operands = zip(builtin_of(call).operands, call.args, strict=False)
    return [
        pointer.args[0]
        for (_, kind), pointer in operands
        if _is_written(kind) and isinstance(pointer.args[0], tirx.BufferLoad)
    ]


def _is_written(kind: object) -> bool:
    return isinstance(kind, Pointer) and "w" in kind.access
