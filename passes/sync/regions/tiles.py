"""Tiles of rows of ragged tensors: a read waits for the announced rows of its tile."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ....builtins.errors import LanguageError
from .accesses import Access, Program
from .footprints import access_footprints
from .granules import is_within_granules, smallest_size


def choose_tile(
    tensor: tirx.Buffer, accesses: Sequence[Access], axes: int, program: Program, world_size: int,
    requested: tuple[int, ...] | None,
) -> int:  # fmt: skip
    """Return the smallest height of a tile, in rows, whose borders cut no access.

    Return the capacity of a segment if no smaller one fits, or if all accesses are of single rows:
    a wait for each row would cost more than it gains.

    Args:
        accesses: accesses to whole rows, from ``access_to_rows``.
        axes: number of axes that select a segment. An access counts the rank axis before them,
            ``Footprints`` do not.
        requested: the user's choice, one size for each axis after the rank axis.

    Raises:
        LanguageError: ``requested`` cuts a row or an access, or has other axes.
    """
    capacity = int(tensor.shape[1 + axes])
    footprints = [access_footprints(access, program, world_size) for access in accesses]
    touched = [f for f in footprints if f.mask.any()]
    bounds = [f.bounds[axes] for f in touched]
    if requested is None:
        size = smallest_size(bounds, capacity)
        return size if size > 1 else capacity
    shape = tuple(int(e) for e in tensor.shape[1:])
    segments, rows, row = (1,) * axes, requested[axes : axes + 1], shape[1 + axes :]
    if requested != (*segments, *rows, *row):
        legal = ", ".join(map(str, (*segments, "rows", *row)))
        raise LanguageError(
            f"tileweave.granule={requested} of {tensor.name}, a ragged tensor; expected ({legal})"
        )
    for footprint, (low, high) in zip(touched, bounds, strict=True):
        if not is_within_granules(low, high, requested[axes]):
            access = footprint.access
            raise LanguageError(
                f"{access.text}: tileweave.granule={requested} of {tensor.name} cuts the rows "
                f"that it accesses; expected a multiple of {smallest_size(bounds, capacity)} rows"
                f"{access.location}"
            )
    return min(requested[axes], capacity)
