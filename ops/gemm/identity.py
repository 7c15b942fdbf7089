"""Addition of partial sums by the tensor cores, which multiply them by the identity.

Each step of a product loads a tile of A and a tile of B. Further steps after the product load a
partial sum as the tile of A and the identity as the tile of B. The same producer loads them through
the same stages, so a partial sum costs as much as a step of its size. Separate loads would cost
each tile several round trips to memory.
"""

from functools import cache
from math import ceil
from typing import Any

import tilelang.language as T
import torch

from ...runtime.host.session import current
from ..core.epilogue import is_fp8
from ..core.operator import Choice
from ..core.problem import Problem
from ..core.tiles import Tiles


def steps_of(tiles: Tiles, dtype: str) -> int:
    """Return the number of steps that add one partial sum to a tile.

    It is 0 for fp8 operands, whose partial sums have another type and cannot be added so.
    """
    return 0 if is_fp8(dtype) else ceil(tiles.N / tiles.K)


def identity_of(tiles: Tiles, ranks: int, dtype: str) -> Any:
    """Return the parameter ``identity`` of a kernel and a plan that add partial sums of ``ranks``
    ranks; None if they have no such parameter."""
    extent = _extent(tiles, ranks, dtype)
    return T.Tensor((extent, extent), dtype) if extent else None


def identities(problem: Problem, choice: Choice) -> tuple[torch.Tensor, ...]:
    """Return the argument for ``identity_of`` on this rank's device, or nothing."""
    extent = _extent(choice.tiles, problem.ranks, problem.tile_dtype)
    return (_identity(extent, problem.dtype, current().group.device),) if extent else ()


def _extent(tiles: Tiles, ranks: int, dtype: str) -> int:
    return steps_of(tiles, dtype) * tiles.K if ranks > 1 else 0


@cache
def _identity(extent: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.eye(extent, dtype=dtype, device=device)
