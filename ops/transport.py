"""Who moves the data of a collective: copy engines, the TMA, threads, or NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..builtins.errors import TileWeaveError
from ..runtime.group import Group
from .collective import Collective
from .strategy import Reasoned, obstacle_of_ranks, require_own_device

if TYPE_CHECKING:
    from .exchange import Exchange

OWN = ("copy_engine", "tma", "ldst")
TRANSPORTS = ("auto", *OWN, "nccl")
FASTEST: dict[str, tuple[tuple[int, str], ...]] = {
    "all_gather": ((0, "ldst"),),
    "reduce_scatter": ((0, "ldst"),),
    "all_reduce": ((0, "ldst"), (16 << 20, "tma")),
    "all_to_all": ((0, "ldst"), (64 << 20, "tma")),
}
"""By collective, from how many bytes on that leave each rank which one is the fastest: measured on
2 H200 that gave 1, 4, 16, 64 and 256 MiB each (benchmarks/LOG.md)."""
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


def chosen(
    asked: str, problem: Collective, device: torch.device, group: Group, made: type[Exchange]
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
    name = fastest(problem, made) if asked == "auto" else asked
    found = obstacle(name, problem, device, group, made)
    if found is None:
        return Transport(name, "asked for" if asked == name else f"{problem.sent} bytes to send")
    if asked == name:
        raise TileWeaveError(f"{problem.op}: transport={asked!r}, but {found}")
    return Transport("nccl", found)


def fastest(problem: Collective, made: type[Exchange]) -> str:
    """The one of ``OWN`` that ``FASTEST`` says, of those that can be."""
    able = [
        name
        for least, name in FASTEST[problem.op]
        if problem.sent >= least and made.obstacle(problem, name) is None
    ]
    return able[-1] if able else "ldst"


def obstacle(
    name: str, problem: Collective, device: torch.device, group: Group, made: type[Exchange]
) -> str | None:
    """What keeps one of ``OWN`` from a problem, and what it needs."""
    return obstacle_of_ranks(device, group) or made.obstacle(problem, name)
