"""Parts of a sum are added by the tensor cores: multiplied by the identity, behind the product.

The steps of a product bring tiles of A and B. More of them bring a part of the sum as a tile of A
and the identity as one of B, by the same producer through the same stages, so that a part costs as
much as a step of its size, where loads of their own cost each tile several round trips to memory.
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
    """Steps that add a part of a tile; 0 if they cannot, as those of fp8 operands, whose parts are
    of another type."""
    return 0 if is_fp8(dtype) else ceil(tiles.N / tiles.K)


def identity_of(tiles: Tiles, ranks: int, dtype: str) -> Any:
    """The parameter of a kernel and a plan that sum up what ``ranks`` computed; None if they do not
    take one."""
    extent = _extent(tiles, ranks, dtype)
    return T.Tensor((extent, extent), dtype) if extent else None


def identities(problem: Problem, choice: Choice) -> tuple[torch.Tensor, ...]:
    """What a plan gets for it, on this rank's device."""
    extent = _extent(choice.tiles, problem.ranks, problem.tile_dtype)
    return (_identity(extent, problem.dtype, current().group.device),) if extent else ()


def _extent(tiles: Tiles, ranks: int, dtype: str) -> int:
    return steps_of(tiles, dtype) * tiles.K if ranks > 1 else 0


@cache
def _identity(extent: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.eye(extent, dtype=dtype, device=device)
