"""Transport of a collective: copy engines, threads, words with flags (NCCL's protocol LL), or NCCL
itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...runtime.host.group import Group
from ..core.collective_problem import CollectiveProblem
from ..core.strategy import Transport, first_possible, obstacle_of_ranks

if TYPE_CHECKING:
    from .collective import Collective

OWN = {"copy_engine": "copy engines", "ldst": "loads and stores", "ll": "words with flags"}
"""What moves the data in each transport with programs of our own."""
COPY_ENGINE_MIN_BYTES = 256 << 20
"""Least bytes per rank from which copy engines are the fastest transport of a collective that
declares ``copy_engine_min_ranks``; at 64 MiB they are not."""
LL_BYTES = 64 << 10
"""Largest input of a rank, in bytes, for which LL is fastest, where each rank sends its input once.
A collective names its own limit in ``ll_bytes``. On 2 H200 LL was the fastest up to these limits
(benchmarks/LOG.md, 2026-11-26, 23:21). For more ranks the limits are estimated: a signal costs
about 1 us, the time in which a link moves 350 KB, and LL sends twice the bytes; 8 ranks send 7 x 64
KiB."""
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
"""Types of values that collectives add, in fp32."""
ROW_BYTES = 16
"""Bytes of a vector that a thread loads or stores; parts for ranks are padded to multiples of
it."""


def auto_transports(problem: CollectiveProblem, collective: type[Collective]) -> tuple[str, ...]:
    """Return the transports of ``OWN`` that ``auto`` tries, fastest first, as measured on 2 and 4
    H200 (benchmarks/LOG.md); for ``ll`` see ``LL_BYTES``. The last one serves every problem that
    any of them serves."""
    if problem.nbytes <= collective.ll_bytes:
        return ("ll", "ldst")
    min_ranks = collective.copy_engine_min_ranks
    engines = min_ranks and problem.ranks >= min_ranks and problem.nbytes >= COPY_ENGINE_MIN_BYTES
    return ("copy_engine", "ldst") if engines else ("ldst",)


def choose_transport(
    requested: str,
    problem: CollectiveProblem,
    device: torch.device,
    group: Group,
    collective: type[Collective],
) -> Transport:
    """Return the transport for a problem. It depends only on values that are equal on all ranks.

    Args:
        collective: class of the collective.

    Raises:
        TileWeaveError: ``requested`` is no transport, or cannot serve the problem; or the tensors
            are on another rank's GPU.
    """
    return first_possible(
        requested, problem.op, device, group, tuple(OWN), auto_transports(problem, collective),
        lambda name: obstacle(name, problem, device, group, collective), Transport,
    )  # fmt: skip


def obstacle(
    name: str,
    problem: CollectiveProblem,
    device: torch.device,
    group: Group,
    collective: type[Collective],
) -> str | None:
    """Return why one of ``OWN`` cannot serve a problem, with what is expected; else None."""
    reason = obstacle_of_ranks(device, group)
    if reason is not None:
        return reason
    if name == "copy_engine" and group.shares_gpus:
        return (
            "ranks share a GPU, where a copy needs the SMs of the kernel that waits for it; "
            "expected a GPU for each rank"
        )
    return collective.obstacle(problem, name)
