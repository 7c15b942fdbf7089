"""Identity matrices that calls pass to kernels, see ``kernels.partial_sums``."""

from functools import cache

import torch

from ..core.gemm_config import GemmConfig
from ..core.problem import Problem
from ..core.tiles import Choice
from .kernels.partial_sums import identity_extent


def identities(
    problem: Problem, choice: Choice, device: torch.device
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the argument for the parameter identity on a device, or nothing."""
    extent = identity_extent(GemmConfig.of(problem, choice.tiles))
    return (_identity(extent, problem.dtype, device),) if extent else ()


@cache
def _identity(extent: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.eye(extent, dtype=dtype, device=device)
