"""Compile a program for the group and load it onto this rank's GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from tilelang import tvm
from tilelang.jit import JITKernel
from tilelang.jit.adapter.tvm_ffi import TVMFFIKernelAdapter
from tvm import tirx
from tvm.runtime import Executable

from ... import passes
from ...builtins.errors import TileWeaveError, brief_errors
from ...builtins.spec import builtin_of
from ...builtins.symmetric import is_symmetric
from ...codegen.compile import compile_by_tilelang
from ...passes.ir.implicit import Implicit, implicit_of
from ...passes.ir.sizes import named
from ...passes.ir.walk import builtins_in, uses_multicast
from ..host import session as sessions
from ..host.heap import HeapExhausted, SymmetricTensor
from ..host.session import Session, current, require_open
from ..host.tracer import tracer_of
from ..plans.parameters import Parameter, bound, parameters_of
from .compile_once import compile_once
from .for_group import for_group as program_for_group
from .host_functions import require_multicast
from .launch_order import CallStream, begin_call, end_call
from .statistics import count_compiled, count_kernel
from .warm import warm


class Kernel:
    """A compiled program: call it like a TileLang kernel; symmetric tensors are accepted.

    It also has the attributes of the TileLang kernel inside (``get_kernel_source``,
    ``get_profiler``, ...).

    Attributes:
        kernel: the TileLang kernel.
        program: the ``T.prim_func`` that was compiled.
        implicit: name -> memory that the compiler added: counters, and ``W.alloc_symmetric``.
        implicit_tensors: name -> this memory as a torch tensor, of all ranks if symmetric.
    """

    def __init__(
        self,
        kernel: JITKernel,
        program: tirx.PrimFunc,
        implicit: Mapping[str, torch.Tensor | SymmetricTensor] = MappingProxyType({}),
        session: Session | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        sizes: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            session: session in which it is compiled; the end of the session frees its memory.
            options: options of ``tilelang.compile``.
            sizes: integers of this program, with which the compiled function is called.
        """
        self._session, self._options, self._sizes = session, options, sizes
        self.kernel, self.program, self.implicit = kernel, program, implicit
        _, self.implicit_tensors = tensors_of((), dict(implicit))

    @brief_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = self._session or current()
        self.require(session)
        watchdog = session.watchdog
        watchdog.raise_if_deadlocked()
        if kwargs or len(args) != len(self._inputs):
            args = bound(str(self.program.attrs["global_symbol"]), self._inputs, args, kwargs)
        try:
            positional, _ = tensors_of(args, {})
            if sessions.only is not session:
                self._require_heap(args, session)
            launch = kernel_to_launch(self, session).launch
            stream = current_call_stream(session) if self.communicates else None
            must_end = begin_call(session, stream)
            result = launch(*positional, *self.added_arguments)
            if must_end:
                end_call(stream)
            return result
        except Exception:
            watchdog.raise_if_deadlocked()
            raise

    def require(self, session: Session) -> None:
        """Raise TileWeaveError if it was compiled for another group than that of ``session``, or in
        a session that has ended."""
        if self._session is None:
            return
        name = str(self.program.attrs["global_symbol"])
        require_open(self._session, name)
        if self._session is not session:
            ours, theirs = self._session.label, session.label
            raise TileWeaveError(f"{name}: compiled for {ours}; expected a kernel for {theirs}")

    def _require_heap(self, args: Iterable[Any], session: Session) -> None:
        """Refuse symmetric tensors of another group."""
        for argument in args:
            if isinstance(argument, SymmetricTensor) and not argument.belongs_to(session.heap):
                raise TileWeaveError(
                    f"{self.program.attrs['global_symbol']}: {argument} is memory of another "
                    f"group; expected tw.symmetric of {session.label}"
                )

    @cached_property
    def communicates(self) -> bool:
        """True if its launches share memory with each other or with other ranks, besides tensors of
        the caller."""
        func = self.program
        is_shared = bool(self.implicit) or any(map(is_symmetric, func.buffer_map.values()))
        return is_shared or any(builtin_of(c).participants for c in builtins_in(func.body))

    @cached_property
    def _inputs(self) -> list[Parameter]:
        """Parameters that are arguments of a call: those of the program that are no outputs."""
        outputs = getattr(getattr(self.kernel, "adapter", None), "result_idx", None) or ()
        return [p for i, p in enumerate(parameters_of(self.program)) if i not in outputs]

    @cached_property
    def launch(self) -> Callable[..., Any]:
        """Function that launches on torch's current stream: TileLang's compiled function without
        its Python adapter.

        Its arguments are all tensors and numbers of the program, then ``added_arguments``.
        """
        return launch_of(self.kernel)

    @property
    def added_arguments(self) -> tuple[Any, ...]:
        """Arguments of ``launch`` after those of the program: the integers that it has for the
        sizes of this program, and the implicit memory."""
        return (*self._sizes, *self.implicit_tensors.values())

    @cached_property
    def traced(self) -> Kernel:
        """Kernel of this program that also records events. It shares the implicit memory.
        Collective at the first use."""
        session = self._session or current()
        func = passes.with_trace(self.program)
        kernel = _compile_and_load(func, for_group(func, session), self._options, session)
        return Kernel(kernel, self.program, self.implicit, session, self._options)

    def free(self) -> None:
        """Free the implicit memory; no launch may follow. Collective, in the same order on all
        ranks.

        ``tw.finalize`` frees the memory of all remaining kernels.
        """
        for memory in self.implicit.values():
            if isinstance(memory, SymmetricTensor) and memory.is_live:
                memory.free()
        self.implicit, self.implicit_tensors = {}, {}
        if (traced := self.__dict__.pop("traced", None)) is not None:
            traced.implicit, traced.implicit_tensors = {}, {}

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # of a copy whose attributes are not set yet
            raise AttributeError(name)
        return getattr(self.kernel, name)


def launch_of(kernel: JITKernel) -> Callable[..., Any]:
    """Return TileLang's compiled function without its Python adapter; the kernel itself if the
    adapter does more than call it."""
    adapter = getattr(kernel, "adapter", None)
    if not isinstance(adapter, TVMFFIKernelAdapter) or adapter.result_idx:
        return kernel
    executable = adapter.get_exportable_executable()
    return (executable.jit() if isinstance(executable, Executable) else executable)["main"]


def compile_kernel(
    func: tirx.PrimFunc, options: Mapping[str, Any], session: Session,
    similar: Callable[[], Iterable[tirx.PrimFunc]] = tuple,
) -> Kernel:  # fmt: skip
    """Compile and load ``func``, which needs no sizes. Collective, unless the session has a kernel
    that computes it; see ``SharedKernels``.

    Args:
        options: options of ``tilelang.compile``.
        similar: returns programs that the kernel shall fit, too, if they differ only in integers.
            Called if there is no kernel.
    """
    program = for_group(func, session)
    if not session.kernels.has([(program, options)], session.group):
        for other in similar():
            with suppress(TileWeaveError):  # programs that cannot be ordered
                session.kernels.add(for_group(other, session), options)
    kernel, sizes = _shared_kernel(func, program, options, session)
    memory = _allocate_implicit(implicit_of(program), session)
    return Kernel(kernel, func, memory, session, options, sizes)


def _shared_kernel(
    func: tirx.PrimFunc, program: tirx.PrimFunc, options: Mapping[str, Any], session: Session
) -> tuple[JITKernel, tuple[int, ...]]:
    """Return the compiled function of ``program``, which is ``func`` for the group, and the
    integers with which it computes this program. Collective if it is not yet compiled."""
    kernels = session.kernels
    kernels.finish([(program, options)], session.group)
    shared, sizes = kernels.find(program, options)
    if shared.kernel is None:
        try:
            shared.kernel = _compile_and_load(
                func, shared.program, options, session, sizes, shared.is_cached
            )
        except Exception:
            if not sizes:
                raise
            # A part of the compiler may need an integer as a constant.
            kernel = _compile_and_load(func, program, options, session)
            shared, sizes = kernels.alone(program, options), ()
            shared.kernel = kernel
        if not shared.is_cached:
            count_compiled(1)
            if session.group.local_rank == 0:
                shared.save()
    return shared.kernel, sizes


def kernel_to_launch(kernel: Kernel, session: Session) -> Kernel:
    """Return the kernel to launch: ``kernel``, or its traced twin while ``tw.trace`` records the
    group of ``session``.

    Raises:
        TileWeaveError: ``tw.trace`` records, and a CUDA graph is being captured.
    """
    if tracer_of(session) is None:
        return kernel
    if capturing():
        raise TileWeaveError(
            f"{kernel.program.attrs['global_symbol']}: a CUDA graph is captured inside of "
            "tw.trace; expected the capture before it: its replays would record events later"
        )
    return kernel.traced


def _compile_and_load(
    func: tirx.PrimFunc, program: tirx.PrimFunc, options: Mapping[str, Any], session: Session,
    sizes: tuple[int, ...] = (), is_cached: bool = False,
) -> JITKernel:  # fmt: skip
    """Compile ``program``, which with these sizes is ``func`` for the group, and load it onto this
    GPU. Collective; see ``compile_once``."""
    name = str(func.attrs["global_symbol"])
    if uses_multicast(program.body):
        require_multicast(name)
    label = f"{named(func)} ({hashlib.sha256(program.script().encode()).hexdigest()[:12]})"
    kernel = compile_once(
        session.group, lambda: compile_by_tilelang(program, **options), label, is_cached
    )
    warm(kernel, session, sizes)
    count_kernel()
    return kernel


def for_group(func: tirx.PrimFunc, session: Session) -> tirx.PrimFunc:
    """Return the program that TileLang compiles: ``func`` with the group's size, the heap's stride
    and the inferred synchronization."""
    return program_for_group(func, session.group.world_size, session.heap.stride)


def current_call_stream(session: Session) -> CallStream:
    """Return torch's current stream on the GPU of ``session``."""
    return CallStream.of(torch.cuda.current_stream(session.group.device), capturing())


def capturing() -> bool:
    """Return whether a CUDA graph captures torch's current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _allocate_implicit(
    implicit: Iterable[Implicit], session: Session
) -> dict[str, torch.Tensor | SymmetricTensor]:
    """Allocate all implicit parameters, by name; if one fails, free the others."""
    memories: dict[str, torch.Tensor | SymmetricTensor] = {}
    try:
        for parameter in implicit:
            memories[parameter.name] = _allocate(parameter, session)
    except HeapExhausted:
        for memory in memories.values():
            if isinstance(memory, SymmetricTensor):
                memory.free()
        raise
    return memories


def _allocate(implicit: Implicit, session: Session) -> torch.Tensor | SymmetricTensor:
    dtype = tvm.DataType(implicit.dtype).as_torch()
    if implicit.symmetric:
        return session.heap.allocate(implicit.shape, dtype)
    return torch.zeros(implicit.shape, dtype=dtype, device=session.group.device)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, with the torch tensor of all ranks for a symmetric tensor."""

    def tensor(argument: Any) -> Any:
        return argument.all if isinstance(argument, SymmetricTensor) else argument

    return [tensor(a) for a in args], {name: tensor(a) for name, a in kwargs.items()}
