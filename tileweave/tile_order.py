"""In which order blocks take the tiles of a matrix."""

from __future__ import annotations

from typing import Any

import tilelang.language as T


def swizzle_2d(index: Any, rows: Any, columns: Any, group: int = 8) -> tuple[Any, Any]:
    """Row and column of the ``index``-th tile of a ``rows`` x ``columns`` grid, walked in bands.

    A band is ``group`` rows high and is walked column by column, so that tiles worked on at the
    same time share rows and columns of the operands in L2 (group = 2, 2 x 3 tiles: 0 2 4 / 1 3 5).
    The last band may be lower. Indices behind the last tile give places outside of the grid.

    Args:
        index: from 0 on; an integer or an expression.
        rows, columns: tiles in each direction.
        group: height of a band, in tiles.

    Returns:
        (row, column), in tiles.
    """
    band = index // (group * columns)
    first = band * group
    left = rows - first
    least, most = (min, max) if isinstance(left, int) else (T.min, T.max)
    height = most(least(left, group), 1)
    within = index % (group * columns)
    return first + within % height, within // height


def own_last(index: Any, tiles: Any, rank: Any, world_size: Any) -> tuple[Any, Any]:
    """Owner and position of the ``index``-th tile when each rank serves its right neighbour first,
    itself last.

    Tiles for others leave early and arrive while the rest is computed; no two ranks start with the
    same owner; what waits for others comes when they have had the most time.

    Args:
        index: 0 to world_size * tiles - 1.
        tiles: tiles of one owner.

    Returns:
        (owner rank, tile 0 to tiles - 1 of that owner).
    """
    return (rank + 1 + index // tiles) % world_size, index % tiles
