"""Strategies and transports of calls: a program of the operator, or NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ...builtins.errors import TileWeaveError
from ...runtime.host.group import Group
from .epilogue import FP8
from .groups import TwoLevels
from .problem import Problem, fp8_obstacle
from .registry import OPERATORS

if TYPE_CHECKING:
    from ..autotune.store import Measurement

FUSED = ("fused",)
_DTYPES = (torch.bfloat16, torch.float16, FP8)
_ROW = 8
"""Alignment of rows in 16-bit elements: the TMA needs multiples of 16 bytes. For the alignment of
fp8 rows see ``fp8_obstacle``."""
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


def choose_strategy(
    requested: str,
    problem: Problem,
    device: torch.device,
    group: Group,
    measured: Measurement | None = None,
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
    strategy = first_possible(
        requested, problem.op, device, group, FUSED, FUSED,
        lambda _: obstacle(problem, device, group), Strategy,
    )  # fmt: skip
    return strategy if strategy.name == "nccl" else None


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


def preferred_strategy(requested: str, problem: Problem, measured: Measurement | None) -> Strategy:
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
