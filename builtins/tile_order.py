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
        index: 0 or more; an integer, an expression or a NumPy array.
        rows, columns: number of tiles in each direction.
        group: number of rows of tiles in a group.

    Returns:
        (row, column), in tiles.

    Raises:
        LanguageError: ``group`` is less than 1.
    """
    _require_positive("W.swizzle_2d", "group", group)
    first_row = index // (group * columns) * group
    rows_left = rows - first_row
    minimum, maximum = _min_max(rows_left)
    height = maximum(minimum(rows_left, group), 1)
    offset = index % (group * columns)
    return first_row + offset % height, offset // height


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
        tiles: number of tiles of one owner.
        rank: the rank that runs the code.
        world_size: number of ranks.
        chunk: number of tiles in a chunk of one owner; the last chunk may be smaller. None puts
            all tiles of an owner into one chunk.

    Returns:
        (owner rank, tile 0 to tiles - 1 of that owner).

    Raises:
        LanguageError: ``chunk`` is less than 1.
    """
    if chunk is not None:
        _require_positive("W.swizzle_ranks", "chunk", chunk)
    if chunk is None or (isinstance(tiles, int) and chunk >= tiles) or world_size == 1:
        return (rank + 1 + index // tiles) % world_size, index % tiles
    minimum, maximum = _min_max(index)
    others, last_chunk = world_size - 1, (tiles - 1) // chunk
    # Round -1 is the others' first chunk; each later round has their next chunk, then an own chunk.
    round_ = minimum((index - others * chunk) // (world_size * chunk), last_chunk - 1)
    offset = index - maximum((round_ * world_size + others) * chunk, 0)
    size = minimum(tiles - (round_ + 1) * chunk, chunk)
    distance = minimum(offset // size, others)
    tile = (round_ + 1 - distance // others) * chunk + offset - distance * size
    return (rank + 1 + distance) % world_size, tile


def _require_positive(op: str, name: str, value: Any) -> None:
    if isinstance(value, int) and value < 1:
        raise reject(op, f"{name}={value}", "1 or more")


def _min_max(value: Any) -> tuple[Any, Any]:
    """Return the functions for the minimum and maximum of values such as ``value``."""
    if isinstance(value, np.ndarray):
        return np.minimum, np.maximum
    return (min, max) if isinstance(value, int) else (T.min, T.max)
