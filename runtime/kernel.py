"""Compile a program for the group and load it onto this rank's GPU."""

from __future__ import annotations

from typing import Any

import tilelang
from tilelang import tvm
from tilelang.jit import JITKernel
from tvm import tirx

from .. import passes
from ..builtins.errors import TileWeaveError
from .compile_once import compile_once
from .heap import SymmetricTensor
from .session import current, init
from .warm import warm


class Kernel:
    """A compiled program: call it as a TileLang kernel; symmetric tensors may be passed as they
    are.

    Attributes of the TileLang kernel inside (``get_kernel_source``, ``get_profiler``, ...) are its
    own too.
    """

    def __init__(self, kernel: JITKernel) -> None:
        self.kernel = kernel

    def __call__(self, *args: Any) -> Any:
        watchdog = current().watchdog
        watchdog.raise_if_deadlocked()
        try:
            return self.kernel(*(a.all if isinstance(a, SymmetricTensor) else a for a in args))
        except Exception:
            watchdog.raise_if_deadlocked()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def compile(func: tirx.PrimFunc, **options: Any) -> Kernel:
    """Compile ``func`` for the group, once a node, and load it onto this rank's GPU. Collective.

    The group's size and the heap's stride become constants of the program; the rank does not, so
    the same kernel serves every rank.

    Args:
        func: a ``@T.prim_func``.
        options: those of ``tilelang.compile``.

    Raises:
        TileWeaveError: ``func`` is no PrimFunc, or compiling failed on some rank.
    """
    if not isinstance(func, tirx.PrimFunc):
        raise TileWeaveError(f"compile: {func!r}; expected a T.prim_func")
    session = init()
    name = str(func.attrs["global_symbol"])
    mod = passes.run_group(
        tvm.IRModule({name: func}), session.group.world_size, session.heap.stride
    )
    (program,) = mod.functions.values()
    kernel = compile_once(session.group, lambda: tilelang.compile(program, **options), name)
    warm(kernel, session)
    return Kernel(kernel)
