"""Strategy of a GEMM operator: a fused kernel, or NCCL and cuBLAS in sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from .epilogue import FP8
from .groups import TwoLevels
from .problem import Problem, fp8_obstacle
from .registry import OPERATORS

if TYPE_CHECKING:
    from ..autotune.store import Measured

_DTYPES = (torch.bfloat16, torch.float16, FP8)
_ROW = 8
"""Alignment of rows in 16-bit elements: the TMA needs multiples of 16 bytes. For the alignment of
fp8 rows see ``fp8_obstacle``."""
_MAX_RANKS = 8
_SM_90, _SM_100 = (9, 0), (10, 0)
"""Compute capabilities for which all kernels compile; on sm_100 none has run."""


class Reasoned(NamedTuple):
    """Name of a strategy or transport, and the reason for it, such as ``fused: asked for``."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Strategy(Reasoned):
    """Implementation of a call.

    Attributes:
        name: ``fused``: our kernel communicates while it multiplies; ``nccl``: a
            collective of ``torch.distributed`` and ``torch.mm``.
        reason: why this name was chosen.
    """


def choose_strategy(
    requested: str,
    problem: Problem,
    device: torch.device,
    group: Group,
    measured: Measured | None = None,
) -> Strategy:
    """Return the strategy for a GEMM. It depends only on values that are equal on all ranks.

    Args:
        requested: argument ``strategy`` of the call.
        measured: result of tuning, if there is one.

    Raises:
        TileWeaveError: ``requested`` is no strategy, or is a fused one for a problem that cannot be
            fused; or the tensors are on another rank's GPU.
    """
    unfused = unfused_gemm_strategy(requested, problem, device, group)
    return unfused or preferred_strategy(requested, problem, measured)


def unfused_gemm_strategy(
    requested: str, problem: Problem, device: torch.device, group: Group
) -> Strategy | None:
    """Return ``nccl``, with the reason, if it is requested or the problem cannot be fused; else
    None."""
    return unfused_strategy(
        requested, problem.op, device, group, lambda: obstacle(problem, device, group)
    )


def unfused_strategy(
    requested: str, op: str, device: torch.device, group: Group,
    obstacle: Callable[[], str | None],
) -> Strategy | None:  # fmt: skip
    """Return ``nccl``, with the reason, if it is requested or the call cannot be fused; else None.

    Args:
        obstacle: returns why the call cannot be fused, with what is expected; else None.

    Raises:
        TileWeaveError: as in ``choose_strategy``.
    """
    legal = ("auto", "fused", "nccl")
    if requested not in legal:
        raise TileWeaveError(
            f"{op}: strategy={requested!r}; expected {', '.join(map(repr, legal))}"
        )
    require_own_device(op, device, group)
    if requested == "nccl":
        return Strategy("nccl", "asked for")
    reason = obstacle()
    if requested != "auto" and reason is not None:
        raise TileWeaveError(f"{op}: strategy={requested!r}, but {reason}")
    return None if reason is None else Strategy("nccl", reason)


def preferred_strategy(requested: str, problem: Problem, measured: Measured | None) -> Strategy:
    """Return the strategy for a problem that can be fused.

    Args:
        requested: ``auto`` or ``fused``.
        measured: result of tuning, if there is one.

    Raises:
        TileWeaveError: every fused program gave wrong results in tuning.
    """
    if requested == "auto":
        return predicted_strategy(problem) if measured is None else measured.strategy
    if requested == "fused" and measured is not None and measured.choice is None:
        raise TileWeaveError(
            f"{problem.op}: strategy='fused', but {measured.strategy.reason}; expected 'auto' or "
            "'nccl'"
        )
    return Strategy(requested, "asked for")


def predicted_strategy(problem: Problem) -> Strategy:
    """Return the strategy that the cost model predicts to be faster."""
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


def obstacle(problem: Problem, device: torch.device, group: Group) -> str | None:
    """Return why a problem cannot be fused, with what is expected; else None."""
    reason = obstacle_of_ranks(device, group, uses_wgmma=True)
    if reason is not None:
        return reason
    if problem.dtype not in _DTYPES:
        return f"the tensors are of {problem.dtype}; expected {' or '.join(map(str, _DTYPES))}"
    for name, extent in (("N", problem.N), ("K", problem.K)):
        if extent % _ROW:
            return f"{name}={extent}; expected a multiple of {_ROW}"
    return fp8_obstacle(problem) if problem.scaled else None
