"""Who multiplies: our kernel, or NCCL and cuBLAS one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host import session
from ...runtime.host.group import Group
from .epilogue import FP8
from .operator import OPERATORS
from .problem import Problem, fp8_obstacle

if TYPE_CHECKING:
    from ..autotune.store import Measured

STRATEGIES = ("auto", "fused", "nccl")
_DTYPES = (torch.bfloat16, torch.float16, FP8)
_ROW = 8
"""Elements of 16 bytes, to a multiple of which the TMA wants every row; fp8 has twice as many."""
_RANKS = 8


class Reasoned(NamedTuple):
    """A name and why this one, such as ``fused: it can be``."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Strategy(Reasoned):
    """How a call is computed.

    Attributes:
        name: ``fused``: one kernel that communicates while it multiplies; ``nccl``: a collective of
            ``torch.distributed`` and ``torch.mm``.
        reason: why this one.
    """


def chosen(
    asked: str,
    problem: Problem,
    device: torch.device,
    group: Group,
    measured: Measured | None = None,
) -> Strategy:
    """The strategy for a problem; it depends on nothing in which ranks could differ.

    Args:
        measured: what tuning found out about the problem, if anything.

    Raises:
        TileWeaveError: ``asked`` is none, or is ``fused`` where that cannot be; or the tensors are
            on another rank's GPU.
    """
    return not_fused(asked, problem, device, group) or preferred(asked, problem, measured)


def not_fused(asked: str, problem: Problem, device: torch.device, group: Group) -> Strategy | None:
    """The strategy for a problem that is not, or cannot be, fused; else None."""
    return unless_fused(asked, problem.op, device, group, lambda: obstacle(problem, device, group))


def unless_fused(
    asked: str, op: str, device: torch.device, group: Group, obstacle: Callable[[], str | None]
) -> Strategy | None:
    """The strategy for what is not, or cannot be, fused; else None.

    Args:
        obstacle: says what keeps fused kernels from it, and what they need.

    Raises:
        TileWeaveError: as ``chosen``.
    """
    if asked not in STRATEGIES:
        raise TileWeaveError(
            f"{op}: strategy={asked!r}; expected {', '.join(map(repr, STRATEGIES))}"
        )
    require_own_device(op, device, group)
    if asked == "nccl":
        return Strategy("nccl", "asked for")
    found = obstacle()
    if asked == "fused" and found is not None:
        raise TileWeaveError(f"{op}: strategy='fused', but {found}")
    return None if found is None else Strategy("nccl", found)


def preferred(asked: str, problem: Problem, measured: Measured | None) -> Strategy:
    """The strategy for a problem that can be fused.

    Args:
        asked: ``fused`` or ``auto``.
        measured: what tuning found out, if anything.

    Raises:
        TileWeaveError: ``fused`` was never right.
    """
    if asked == "auto":
        return predicted(problem) if measured is None else measured.strategy
    if measured is not None and measured.choice is None:
        raise TileWeaveError(
            f"{problem.op}: strategy='fused', but {measured.strategy.reason}; expected 'auto' or "
            "'nccl'"
        )
    return Strategy("fused", "asked for")


def predicted(problem: Problem) -> Strategy:
    """The one that should be faster."""
    fused, nccl = OPERATORS[problem.op].predicted(problem)
    name = "fused" if fused <= nccl else "nccl"
    return Strategy(name, f"predicted: fused {fused / 1e3:.3f} ms, nccl {nccl / 1e3:.3f} ms")


def require_own_device(op: str, device: torch.device, group: Group) -> None:
    """Refuse tensors on another rank's GPU."""
    if group.device.type == device.type and group.device != device:
        raise TileWeaveError(
            f"{op}: the tensors are on {device}; expected {group.device}, which tw.init "
            "gave to this rank"
        )


def obstacle_of_ranks(device: torch.device, group: Group) -> str | None:
    """What keeps kernels from exchanging tensors on a device, and what they need."""
    if device.type != "cuda":
        return f"the tensors are on {device}; expected cuda"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"{device} is sm_{major}{minor}; expected sm_90"
    if group.world_size > _RANKS:
        return f"there are {group.world_size} ranks; expected at most {_RANKS}"
    joined = session.joined()
    if joined is not None and joined.group != group:
        return f"its {group.world_size} ranks are not the group that tw.init joined; expected that"
    return None


def obstacle(problem: Problem, device: torch.device, group: Group) -> str | None:
    """What keeps the fused kernel from a problem, and what it needs."""
    found = obstacle_of_ranks(device, group)
    if found is not None:
        return found
    if problem.dtype not in _DTYPES:
        return f"the tensors are of {problem.dtype}; expected {' or '.join(map(str, _DTYPES))}"
    for name, extent in (("N", problem.N), ("K", problem.K)):
        if extent % _ROW:
            return f"{name}={extent}; expected a multiple of {_ROW}"
    return fp8_obstacle(problem) if problem.scaled else None
