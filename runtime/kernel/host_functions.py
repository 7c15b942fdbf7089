"""Functions that the host code of a compiled program calls at each launch.

The pass ``bind_runtime`` inserts the calls.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

from ...builtins.errors import TileWeaveError
from ...builtins.implicit import CONTEXT
from ...builtins.ranks import RANK, WORLD_SIZE
from ...passes.ir.host import BEGIN_LAUNCH, BIND, REQUIRE_MULTICAST
from ..host.native import library
from ..host.session import Session, current, joined, opened
from ..host.tracer import active

_Words = ctypes.POINTER(ctypes.c_int64)
"""A TVMFFIAny is two 64-bit words; the second one holds the value."""

_VALUES: dict[str, Callable[[Session], int]] = {
    CONTEXT: lambda session: session.context.address,
    RANK: lambda session: session.group.rank,
    WORLD_SIZE: lambda session: session.group.world_size,
}
_opened: dict[Session | None, tuple[Any, int]] = {}
"""Open sessions whose values the native part binds -> the native part, and the handle in it."""


class _Thread(threading.local):
    session: Session | None = None


_thread = _Thread()
"""Session of the launches of a thread."""


def register() -> None:
    """Register the functions to which ``bind_runtime`` inserts calls."""
    tvm_ffi.register_global_func(BIND, f=_bind, override=True)
    tvm_ffi.register_global_func(REQUIRE_MULTICAST, f=require_multicast, override=True)
    tvm_ffi.register_global_func(BEGIN_LAUNCH, f=_begin_launch, override=True)


def open_session(session: Session) -> None:
    """Let launches bind the values of ``session``; the native part binds them, or Python."""
    native = library()
    if native is not None:
        values = {name: get(session) for name, get in _VALUES.items()}
        _opened[session] = native, native.open_session(values)
    _set_default(native)


def close_session(session: Session) -> None:
    """Forget the values of ``session``, which is no longer open."""
    native, handle = _opened.pop(session, (None, 0))
    if native is not None:
        native.close_session(handle)
    _set_default(native)


def bind_session(session: Session) -> None:
    """Bind the values of ``session`` at the later launches of this thread."""
    if _thread.session is not session:
        _thread.session = session
        if session in _opened:
            native, handle = _opened[session]
            native.bind_session(handle)


def _set_default(native: Any) -> None:
    """Set the session of threads that have bound none: the default group's, or the first."""
    if native is not None:
        _, handle = _opened.get(_default(), (None, 0))
        native.set_default_session(_bind, handle)
    tvm_ffi.register_global_func(BIND, f=_bind if native is None else native.bind, override=True)


def _default() -> Session | None:
    return joined() or next(iter(opened()), None)


def _bind(slots: ctypes.c_void_p, names: str) -> None:
    """Write the values of ``names``, separated by commas, to ``slots`` on the host's stack."""
    session = _thread.session if _thread.session in opened() else _default() or current()
    words = ctypes.cast(slots, _Words)
    for index, name in enumerate(names.split(",")):
        words[2 * index + 1] = _VALUES[name](session)


def _begin_launch(slots: ctypes.c_void_p, events: str) -> None:
    """Write the number of a launch with this table of events to the slot; -1 if it is not recorded:
    there is no trace, or a CUDA graph is captured."""
    tracer = active()
    number = (
        -1
        if tracer is None or torch.cuda.is_current_stream_capturing()
        else tracer.begin_launch(events)
    )
    ctypes.cast(slots, _Words)[1] = number


def require_multicast(kernel: str) -> None:
    """Raise TileWeaveError with the name ``kernel`` if the machine has no usable multicast."""
    from ..host.topology import topology

    multicast = topology().multicast
    if not multicast:
        raise TileWeaveError(
            f"{kernel}: uses multimem instructions, but this machine has no usable NVLink "
            "multicast; expected a machine that has it (`tileweave doctor` says why not)"
        )
