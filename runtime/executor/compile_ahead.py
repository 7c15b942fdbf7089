"""Compile several programs in parallel, before the first calls need them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tvm import tirx

from ... import passes
from ...codegen.compile import compile_by_tilelang
from ..host.cache_folder import require_private_cache
from ..host.session import Session, current
from ..kernel.kernel import for_group
from .plan import Plan


def compile_ahead(programs: Iterable[tirx.PrimFunc | Plan], group: Any = None) -> int:
    """Fill TileLang's cache with the kernels that ``tw.compile`` and first calls of plans look up.

    The ranks of a node divide the programs among themselves, and each rank compiles as many at a
    time as it has cores. A program that does not compile is skipped; its first call raises the
    error. Collective, with the same programs in the same order on all ranks.

    Args:
        programs: programs, and plans without scalars; all extents are integers. Equal programs are
            compiled once.
        group: ranks that run them; see ``tw.init``.

    Returns:
        Number of different kernels.
    """
    session = current(group)
    ranks = session.group
    require_private_cache()
    kernels = _kernels(programs, session)
    hosts = ranks.exchange("compile ahead", socket.gethostname())
    local_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    own_kernels = kernels[local_ranks.index(ranks.rank) :: len(local_ranks)]
    workers = max(1, len(os.sched_getaffinity(0)) // len(local_ranks))
    with ThreadPoolExecutor(workers, "compile", _take_gpu, (ranks.device,)) as pool:
        futures = [pool.submit(compile_by_tilelang, k, **options) for k, options in own_kernels]
    for future in futures:
        future.exception()  # the next attempt to compile it raises it
    ranks.meet("compiled ahead", timeout_s=3600.0)
    return len(kernels)


def _kernels(
    programs: Iterable[tirx.PrimFunc | Plan], session: Session
) -> list[tuple[tirx.PrimFunc, dict[str, Any]]]:
    """Return the kernels and options that ``tw.compile`` passes to TileLang."""
    kernels: dict[str, tuple[tirx.PrimFunc, dict[str, Any]]] = {}
    for program in programs:
        configs = program.pass_configs if isinstance(program, Plan) else {}
        funcs = (
            program.kernels(session.group.world_size) if isinstance(program, Plan) else [program]
        )
        for func in funcs:
            func, stock_configs = passes.split_options(func, configs)
            try:
                kernel = for_group(func, session)
            except Exception:
                continue
            options = {"pass_configs": stock_configs, "out_idx": None}
            kernels.setdefault(f"{kernel.script()}{stock_configs}", (kernel, options))
    return list(kernels.values())


def _take_gpu(device: torch.device) -> None:
    """Set the current GPU, which each thread has its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
