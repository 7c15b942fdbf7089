"""Compile a program for the group and load it onto this rank's GPU."""

from __future__ import annotations

import hashlib
from typing import Any

import tilelang
from tilelang import tvm
from tilelang.jit import JITKernel
from tvm import tirx

from .. import passes
from ..builtins.declare import builtin_of
from ..builtins.errors import TileWeaveError
from ..passes.walk import builtins_in
from .compile_once import compile_once
from .heap import SymmetricTensor
from .host_functions import require_multicast
from .session import current, init
from .warm import warm


class Kernel:
    """A compiled program: call it as a TileLang kernel; symmetric tensors may be passed as they
    are.

    Attributes of the TileLang kernel inside (``get_kernel_source``, ``get_profiler``, ...) are its
    own too; ``program`` is the ``T.prim_func`` it was made of.
    """

    def __init__(self, kernel: JITKernel, program: tirx.PrimFunc) -> None:
        self.kernel, self.program = kernel, program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watchdog = current().watchdog
        watchdog.raise_if_deadlocked()
        try:
            positional, named = tensors_of(args, kwargs)
            return self.kernel(*positional, **named)
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
        TileWeaveError: ``func`` is no PrimFunc, an option is not supported, or compiling failed on
            some rank.
    """
    if (backend := options.get("execution_backend")) not in (None, "auto", "tvm_ffi"):
        raise TileWeaveError(
            f"compile: execution_backend={backend!r} has no host code that could bind the rank; "
            "expected 'auto' or 'tvm_ffi'"
        )
    if not isinstance(func, tirx.PrimFunc):
        raise TileWeaveError(f"compile: {func!r}; expected a T.prim_func")
    session = init()
    name = str(func.attrs["global_symbol"])
    mod = passes.run_group(
        tvm.IRModule({name: func}), session.group.world_size, session.heap.stride
    )
    (program,) = mod.functions.values()
    if any(builtin_of(c).name.startswith("multimem") for c in builtins_in(program.body)):
        require_multicast(name)
    what = f"{name} ({hashlib.sha256(program.script().encode()).hexdigest()[:12]})"
    kernel = compile_once(session.group, lambda: tilelang.compile(program, **options), what)
    warm(kernel, session)
    return Kernel(kernel, func)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call, symmetric tensors replaced by their torch tensors of all ranks."""

    def tensor(argument: Any) -> Any:
        return argument.all if isinstance(argument, SymmetricTensor) else argument

    return [tensor(a) for a in args], {name: tensor(a) for name, a in kwargs.items()}
