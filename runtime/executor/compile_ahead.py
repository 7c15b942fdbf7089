"""Compile several programs in parallel, before the first calls need them."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import torch
from tvm import tirx

from ... import passes
from ...builtins.errors import SyncWarning
from ...codegen.compile import compile_by_tilelang
from ..host.cache_folder import require_private_cache
from ..host.group import Group
from ..host.session import current
from ..kernel.compile_workers import CompileWorkers
from ..kernel.for_group import for_group
from ..kernel.shared_kernels import SharedKernel, SharedKernels
from ..kernel.statistics import count_compiled
from ..kernel.stored_programs import is_noted, note
from .plan import Plan

_IN_THREADS = 2
"""Maximum number of kernels that threads of this process compile: for so few, starting other
processes takes longer."""
_Program = tuple[tirx.PrimFunc, dict[str, Any]]
"""A program for a group, and the options of TileLang."""


class Later(NamedTuple):
    """Kernels for other sizes, which a process that is no rank compiles for the cache.

    Attributes:
        name: identity of the kernels.
        compile: compiles them; picklable.
    """

    name: str
    compile: Callable[[], Any]


@dataclass(frozen=True)
class Compilation:
    """Kernels that other processes and ranks compile while this rank goes on.

    Attributes:
        kernels: number of kernels that have to be compiled, without those for other sizes.
        work: what this rank's processes do, also for other sizes.
    """

    kernels: int
    work: Sequence[Future[None]] = ()

    def wait(self) -> None:
        """Wait for this rank's part, also for other sizes. A call of an operator waits for the
        kernels that it needs, on all ranks."""
        wait(self.work)


def compile_ahead(
    programs: Iterable[tirx.PrimFunc | Plan], group: Any = None,
    similar: Callable[[], Iterable[tirx.PrimFunc | Plan]] = tuple,
    waits: bool = True, later: Iterable[Later] = (),
) -> Compilation:  # fmt: skip
    """Fill TileLang's cache with the kernels that ``tw.compile`` and first calls of plans look up.

    The ranks of a node divide the programs among themselves, and each rank compiles as many at a
    time as it has cores. A program that does not compile is skipped; its first call raises the
    error. Collective, with the same programs in the same order on all ranks, unless the session has
    all kernels and there is nothing in ``later``.

    Args:
        programs: programs, and plans without scalars; all extents are integers. Equal programs are
            compiled once.
        group: ranks that run them; see ``tw.init``.
        similar: returns such programs of other sizes that the kernels shall fit, too, if they
            differ only in integers; see ``Options.share``. Called if there is a kernel to compile.
        waits: whether to wait for the kernels. Otherwise the first calls that need them wait.
        later: kernels that are compiled after these, unless an earlier process has done so. Nothing
            waits for them.
    """
    session, later, share = current(group), list(later), None
    kernels, ranks, stride = session.kernels, session.group, session.heap.stride
    new: list[tuple[SharedKernel, dict[str, Any]]] = []
    work: list[Future[None]] = []
    with ExitStack() as stack:
        if later:
            share = _share_of(ranks)
            later = [other for other in later[share.own] if not is_noted(other.name)]
        compiler: CompileWorkers | _Threads | None = None
        if later:  # its processes import the compiler, while this one makes the programs
            compiler = stack.enter_context(closing(CompileWorkers(share.cores)))
        own = [*_for_group(programs, ranks.world_size, stride)]
        if not kernels.has(own, ranks):
            share = share or _share_of(ranks)
            if compiler is None:
                is_few = len(own) <= _IN_THREADS * share.ranks
                compiler = _Threads(ranks.device) if is_few else CompileWorkers(share.cores)
                stack.enter_context(closing(compiler))
            for program in (*own, *_for_group(similar(), ranks.world_size, stride)):
                kernels.add(*program)
            new = _kernels(own, kernels)
            for shared, _ in new:
                shared.is_compiling = True
            for shared, options in new[share.own]:
                compile = partial(compile_by_tilelang, shared.program, **options)
                shared.work = compiler.submit(compile, shared.save)
                work.append(shared.work)
        for other in later:
            work.append(compiler.submit(other.compile, partial(note, other.name)))
    count_compiled(len(new))
    if waits:
        kernels.finish(own, ranks)
    return Compilation(len(new), work)


class _Share(NamedTuple):
    """Part of the work of a node that is this rank's.

    Attributes:
        own: this rank's elements of a list of work.
        ranks: number of ranks of the node.
        cores: number of cores for this rank.
    """

    own: slice
    ranks: int
    cores: int


def _share_of(ranks: Group) -> _Share:
    """Return this rank's part of the work of its node. Collective."""
    require_private_cache()
    hosts = ranks.exchange("compile ahead", socket.gethostname())
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    count = len(local_ranks)
    own = slice(local_ranks.index(ranks.rank), None, count)
    return _Share(own, count, max(1, len(os.sched_getaffinity(0)) // count))


class _Threads:
    """Threads of this process, in the place of ``CompileWorkers``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def submit(self, call: Callable[[], Any], then: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()

        def make_call() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            try:
                call()
                then()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        Thread(target=make_call).start()
        return future

    def close(self) -> None:
        """Do nothing: each thread ends with its call."""


def _kernels(
    programs: Iterable[_Program], shared_kernels: SharedKernels
) -> list[tuple[SharedKernel, dict[str, Any]]]:
    """Return the kernels that nothing compiles yet, and the options that ``tw.compile`` passes to
    TileLang."""
    kernels: dict[int, tuple[SharedKernel, dict[str, Any]]] = {}
    for program, options in programs:
        shared, _ = shared_kernels.find(program, options)
        if not shared.is_found:
            kernels[id(shared)] = shared, options
    return list(kernels.values())


def compile_alone(
    programs: Iterable[tirx.PrimFunc | Plan],
    similar: Callable[[], Iterable[tirx.PrimFunc | Plan]], world_size: int, heap_stride: int,
) -> None:  # fmt: skip
    """Compile what sessions of ``world_size`` ranks with such heaps find later, as
    ``compile_ahead`` does, in a process that is no rank."""
    kernels = SharedKernels(is_stored=True)
    own = [*_for_group(programs, world_size, heap_stride)]
    if kernels.has(own, None):
        return
    for program in (*own, *_for_group(similar(), world_size, heap_stride)):
        kernels.add(*program)
    for shared, options in _kernels(own, kernels):
        compile_by_tilelang(shared.program, **options)
        shared.save()


def _for_group(
    programs: Iterable[tirx.PrimFunc | Plan], world_size: int, heap_stride: int
) -> Iterator[_Program]:
    """Yield the programs for a group, and the options of TileLang; those of plans one by one.
    Programs that cannot be ordered are left out."""
    for program in programs:
        found: list[_Program] = []
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore", SyncWarning)  # compiling them warns
            for func in program.kernels(world_size) if isinstance(program, Plan) else [program]:
                func, stock_configs = passes.split_options(func, {})
                ordered = for_group(func, world_size, heap_stride)
                found.append((ordered, {"pass_configs": stock_configs, "out_idx": None}))
        yield from found
