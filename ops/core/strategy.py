"""Strategies and transports of calls: a program of the operator, or NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from .groups import TwoLevels

FUSED = ("fused",)
_MAX_RANKS = 8
_SM_90, _SM_100 = (9, 0), (10, 0)
"""Compute capabilities for which all kernels compile; on sm_100 none has run."""


class Selection(NamedTuple):
    """Name of a strategy or transport, and the reason for it, such as ``fused: asked for``."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


R = TypeVar("R", bound=Selection)


class Strategy(Selection):
    """Implementation of a call.

    Attributes:
        name: ``fused``: our kernel communicates while it multiplies; ``nccl``: a
            collective of ``torch.distributed`` and ``torch.mm``.
        reason: why this name was chosen.
    """


class Transport(Selection):
    """Transport of a call.

    Attributes:
        name: ``copy_engine``: copy engines move data between GPUs, not SMs; ``ldst``: loads and
            stores of threads; ``ll``: the same, by words of data and a flag; ``nccl``:
            ``torch.distributed``.
        reason: why this transport was chosen.
    """


def first_possible(
    requested: str, op: str, device: torch.device, group: Group, own: Sequence[str],
    preferred: Sequence[str], obstacle: Callable[[str], str | None], kind: type[R],
) -> R:  # fmt: skip
    """Return the requested strategy or transport; for ``auto`` the first one without an obstacle,
    or ``nccl``.

    Args:
        own: names of the operator's programs.
        preferred: those of them that ``auto`` tries, in this order; if empty, ``auto`` uses
            ``nccl``.
        obstacle: returns why one of ``own`` cannot serve the call, with what is expected;
            else None.
        kind: class of the result, after which callers name the argument.

    Raises:
        TileWeaveError: ``requested`` is no such name, or cannot serve the call; or the tensors are
            on another rank's GPU.
    """
    argument = kind.__name__.lower()
    check_requested(requested, op, own, argument)
    require_own_device(op, device, group)
    if requested == "nccl":
        return kind("nccl", "asked for")
    reason: str | None = "auto prefers it"
    for name in preferred if requested == "auto" else (requested,):
        reason = obstacle(name)
        if reason is None:
            return kind(name, "asked for" if requested == name else "the fastest")
    if requested != "auto":
        raise TileWeaveError(f"{op}: {argument}={requested!r}, but {reason}")
    return kind("nccl", reason)


def check_requested(
    requested: Any, op: str, own: Sequence[str], argument: str = "transport"
) -> None:
    """Refuse a value that is neither ``auto`` nor ``nccl`` nor in ``own``; see
    ``first_possible``."""
    legal = ("auto", *own, "nccl")
    if requested not in legal:
        expected = ", ".join(map(repr, legal))
        raise TileWeaveError(f"{op}: {argument}={requested!r}; expected {expected}")


def require_own_device(op: str, device: torch.device, group: Group) -> None:
    """Refuse tensors on another rank's GPU."""
    if group.device.type == device.type and group.device != device:
        raise TileWeaveError(
            f"{op}: the tensors are on {device}; expected {group.device}, which tw.init "
            "gave to this rank"
        )


def obstacle_of_ranks(
    device: torch.device, group: Group | TwoLevels, uses_wgmma: bool = False
) -> str | None:
    """Return why kernels of these ranks cannot exchange tensors on a device, with what is expected;
    else None. Collective for a new group.

    Args:
        uses_wgmma: whether the kernels multiply by wgmma, which only sm_90 has.
    """
    if isinstance(group, TwoLevels):
        return "the group has several nodes; expected ranks of one node"
    if device.type != "cuda":
        return f"the tensors are on {device}; expected cuda"
    legal = (_SM_90,) if uses_wgmma else (_SM_90, _SM_100)
    if (sm := torch.cuda.get_device_capability(device)) not in legal:
        names = [f"sm_{major}{minor}" for major, minor in (sm, *legal)]
        return f"{device} is {names[0]}; expected {' or '.join(names[1:])}"
    if group.world_size > _MAX_RANKS:
        return f"there are {group.world_size} ranks; expected at most {_MAX_RANKS}"
    if len(nodes := dict.fromkeys(group.nodes)) > 1:
        return f"its ranks are on the nodes {', '.join(nodes)}; expected ranks of one node"
    return None
