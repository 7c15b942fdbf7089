"""Orders in which blocks compute the tiles of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import tilelang.language as T

from .errors import reject

__all__ = ["swizzle_2d", "swizzle_ranks"]


def swizzle_2d(index: Any, rows: Any, columns: Any, group: int = 8) -> tuple[Any, Any]:
    """Return row and column of tile ``index`` of a grid that is traversed in groups of rows.

    A group has ``group`` rows of tiles and is traversed column by column, so that tiles computed
    at the same time share rows and columns of the operands in L2 (group = 2, 2 x 3 tiles:
    0 2 4 / 1 3 5). The last group may have fewer rows. Indices after the last tile give positions
    outside of the grid.

    Args:
        index: from 0 on; an integer, an expression or a NumPy array.
        rows, columns: tiles in each direction.
        group: rows of tiles in a group.

    Returns:
        (row, column), in tiles.

    Raises:
        LanguageError: a height below 1.
    """
    _require_positive("W.swizzle_2d", "group", group)
    band = index // (group * columns)
    first = band * group
    left = rows - first
    least, most = _least_most(left)
    height = most(least(left, group), 1)
    within = index % (group * columns)
    return first + within % height, within // height


def swizzle_ranks(
    index: Any, tiles: Any, rank: Any, world_size: Any, chunk: int | None = None
) -> tuple[Any, Any]:
    """Return owner and position of tile ``index``: the right neighbor's first, own tiles last.

    Tiles for other ranks are sent early and arrive while the others are computed. No two ranks
    start with the same owner. Own tiles, which wait for other ranks, come last; tiles from the left
    neighbor arrive first, then those of the rank to its left.

    With ``chunk``, a rank's own tiles follow one chunk after those of the other ranks, so that the
    first own tiles are complete early: the others' chunk 0, their chunk 1, own chunk 0, their
    chunk 2, own chunk 1, and so on.

    Args:
        index: 0 to world_size * tiles - 1; an integer, an expression or a NumPy array.
        tiles: tiles of one owner.
        chunk: tiles of an owner that are taken together, the last time maybe fewer; None for all.

    Returns:
        (owner rank, tile 0 to tiles - 1 of that owner).

    Raises:
        LanguageError: a chunk of less than one tile.
    """
    if chunk is not None:
        _require_positive("W.swizzle_ranks", "chunk", chunk)
    if chunk is None or (isinstance(tiles, int) and chunk >= tiles) or world_size == 1:
        return (rank + 1 + index // tiles) % world_size, index % tiles
    least, most = _least_most(index)
    others, last = world_size - 1, (tiles - 1) // chunk
    # The others' first chunk is turn -1; a turn has their next one and then the own one.
    turn = least((index - others * chunk) // (world_size * chunk), last - 1)
    within = index - most((turn * world_size + others) * chunk, 0)
    height = least(tiles - (turn + 1) * chunk, chunk)
    place = least(within // height, others)
    tile = (turn + 1 - place // others) * chunk + within - place * height
    return (rank + 1 + place) % world_size, tile


def _require_positive(op: str, name: str, value: Any) -> None:
    if isinstance(value, int) and value < 1:
        raise reject(op, f"{name}={value}", "at least 1 tile")


def _least_most(value: Any) -> tuple[Any, Any]:
    if isinstance(value, np.ndarray):
        return np.minimum, np.maximum
    return (min, max) if isinstance(value, int) else (T.min, T.max)
