"""Who moves the data of a collective: copy engines, the TMA, threads, or NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host import session
from ...runtime.host.group import Group
from ..core.collective_problem import CollectiveProblem
from ..core.strategy import Reasoned, obstacle_of_ranks, require_own_device

if TYPE_CHECKING:
    from .collective import Collective

OWN = ("copy_engine", "tma", "ldst")
TRANSPORTS = ("auto", *OWN, "nccl")
ENGINES_FROM = 256 << 20
"""Bytes of a rank from which copy engines are the fastest of some collectives; of 64 MiB they are
not."""
ENGINES = {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 2}
"""These collectives, each with the least number of ranks."""
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
"""Types that are added in fp32."""
ROW_BYTES = 16
"""A multiple of it is what the TMA moves."""


class Transport(Reasoned):
    """How a collective moves data.

    Attributes:
        name: ``copy_engine``: no SM moves between GPUs; ``tma``: tiles by way of shared memory;
            ``ldst``: loads and stores of threads; ``nccl``: ``torch.distributed``.
        reason: why this one.
    """


def fastest(problem: CollectiveProblem) -> tuple[str, ...]:
    """Those of ``OWN`` that ``auto`` takes, the fastest first: measured on 2 and 4 H200
    (benchmarks/LOG.md). The last takes all that any of them takes."""
    least = ENGINES.get(problem.op)
    engines = least and problem.ranks >= least and problem.nbytes >= ENGINES_FROM
    return ("copy_engine", "ldst") if engines else ("ldst",)


def chosen(
    asked: str,
    problem: CollectiveProblem,
    device: torch.device,
    group: Group,
    made: type[Collective],
) -> Transport:
    """The transport for a problem; it depends on nothing in which ranks could differ.

    Args:
        made: the collective.

    Raises:
        TileWeaveError: ``asked`` is none, or cannot be; or the tensors are on another rank's GPU.
    """
    if asked not in TRANSPORTS:
        raise TileWeaveError(
            f"{problem.op}: transport={asked!r}; expected {', '.join(map(repr, TRANSPORTS))}"
        )
    require_own_device(problem.op, device, group)
    if asked == "nccl":
        return Transport("nccl", "asked for")
    for name in fastest(problem) if asked == "auto" else (asked,):
        found = obstacle(name, problem, device, group, made)
        if found is None:
            return Transport(name, "asked for" if asked == name else "the fastest")
    if asked != "auto":
        raise TileWeaveError(f"{problem.op}: transport={asked!r}, but {found}")
    return Transport("nccl", found)


def obstacle(
    name: str,
    problem: CollectiveProblem,
    device: torch.device,
    group: Group,
    made: type[Collective],
) -> str | None:
    """What keeps one of ``OWN`` from a problem, and what it needs."""
    found = obstacle_of_ranks(device, group)
    if found is not None:
        return found
    joined = session.joined()
    if name == "copy_engine" and joined is not None and joined.group.shares_gpus:
        return (
            "ranks share a GPU, where a copy needs the SMs of the kernel that waits for it; "
            "expected a GPU for each rank"
        )
    return made.obstacle(problem, name)
