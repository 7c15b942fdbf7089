"""Compile several programs in parallel, before the first calls need them."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from typing import Any

import torch
from tqdm import tqdm
from tvm import tirx

from ... import passes
from ...codegen.compile import compile_by_tilelang
from ..host.cache_folder import require_private_cache
from ..host.session import Session, current
from ..kernel.kernel import for_group
from ..kernel.shared_kernels import SharedKernel
from .compile_workers import CompileWorkers
from .plan import Plan

_IN_THREADS = 2
"""Maximum number of kernels that threads of this process compile: for so few, starting other
processes takes longer."""


def compile_ahead(
    programs: Iterable[tirx.PrimFunc | Plan], group: Any = None,
    similar: Callable[[], Iterable[tirx.PrimFunc | Plan]] = tuple,
) -> int:  # fmt: skip
    """Fill TileLang's cache with the kernels that ``tw.compile`` and first calls of plans look up.

    The ranks of a node divide the programs among themselves, and each rank compiles as many at a
    time as it has cores; rank 0 shows the progress of its part. A program that does not compile is
    skipped; its first call raises the error. Collective, with the same programs in the same order
    on all ranks, unless the session has all kernels.

    Args:
        programs: programs, and plans without scalars; all extents are integers. Equal programs are
            compiled once.
        group: ranks that run them; see ``tw.init``.
        similar: returns such programs of other sizes that the kernels shall fit, too, if they
            differ only in integers; see ``Options.share``. Called if there is a kernel to compile.

    Returns:
        Number of kernels that are compiled.
    """
    session = current(group)
    own = [*_for_group(programs, session)]
    if session.kernels.has(own, session.group):
        return 0
    for program in (*own, *_for_group(similar(), session)):
        session.kernels.add(*program)
    ranks = session.group
    require_private_cache()
    kernels = _kernels(own, session)
    hosts = ranks.exchange("compile ahead", socket.gethostname())
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    own_kernels = kernels[local_ranks.index(ranks.rank) :: len(local_ranks)]
    cores = len(os.sched_getaffinity(0)) // len(local_ranks)
    workers = max(1, min(cores, len(own_kernels)))
    with ExitStack() as stack:
        compile: Callable[..., Any] = compile_by_tilelang
        if len(own_kernels) > _IN_THREADS:
            compile = stack.enter_context(CompileWorkers(workers)).compile
        threads = ThreadPoolExecutor(workers, "compile", _take_gpu, (ranks.device,))
        pool = stack.enter_context(threads)
        futures = [pool.submit(_compile_and_save, compile, *kernel) for kernel in own_kernels]
        progress = tqdm(
            as_completed(futures), "compiling kernels", len(futures), leave=False,
            disable=None if ranks.rank == 0 else True,  # None: in a terminal only
        )  # fmt: skip
        deque(progress, maxlen=0)  # the next attempt to compile a program raises its error
    ranks.meet("compiled ahead", timeout_s=3600.0)
    for shared, _ in kernels:
        shared.is_cached = True
    return len(kernels)


_Program = tuple[tirx.PrimFunc, dict[str, Any]]
"""A program for a group, and the options of TileLang."""


def _kernels(
    programs: Iterable[_Program], session: Session
) -> list[tuple[SharedKernel, dict[str, Any]]]:
    """Return the kernels that are not compiled, and the options that ``tw.compile`` passes to
    TileLang."""
    kernels: dict[int, tuple[SharedKernel, dict[str, Any]]] = {}
    for program, options in programs:
        shared, _ = session.kernels.find(program, options)
        if not shared.is_cached and shared.kernel is None:
            kernels[id(shared)] = shared, options
    return list(kernels.values())


def _for_group(programs: Iterable[tirx.PrimFunc | Plan], session: Session) -> Iterator[_Program]:
    """Yield the programs for the group, and the options of TileLang; those of plans one by one.
    Programs that cannot be ordered are left out."""
    for program in programs:
        ranks = session.group.world_size
        with suppress(Exception):
            for func in program.kernels(ranks) if isinstance(program, Plan) else [program]:
                func, stock_configs = passes.split_options(func, {})
                yield for_group(func, session), {"pass_configs": stock_configs, "out_idx": None}


def _compile_and_save(
    compile: Callable[..., Any], kernel: SharedKernel, options: dict[str, Any]
) -> None:
    compile(kernel.program, **options)
    kernel.save()


def _take_gpu(device: torch.device) -> None:
    """Set the current GPU, which each thread has its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
