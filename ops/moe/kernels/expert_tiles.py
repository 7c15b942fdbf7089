"""Kernel that lists the row tiles of all experts on the GPU, without waiting on the host."""

from math import ceil
from typing import Any

import tilelang.language as T

ROW, END, EXPERT = range(3)
"""Columns of the list: first row of a tile, end of the rows of its expert, and the expert."""
TILES, USED = range(2)
"""Elements of ``counts``: number of tiles, and end of the rows of the last expert."""
THREADS = 128


def most_tiles(rows: int, experts: int, tile_rows: int) -> int:
    """Return an upper bound of the number of row tiles, for any valid offsets."""
    return rows // tile_rows + experts


@T.macro
def number_of(ends, expert, tile_rows):
    """Return the number of tiles of an expert; 0 if the end of its rows is before their begin."""
    begin = T.if_then_else(expert > 0, ends[T.max(expert - 1, 0)], 0)
    return T.max(T.ceildiv(ends[expert] - begin, tile_rows), 0)


def expert_tiles(experts: int, tile_rows: int) -> Any:
    """Build the kernel: list the tiles of all experts, in the order of the experts.

    Expert e has the rows from ``offsets[e - 1]``, or 0, to ``offsets[e]``. The last tile of an
    expert with at least ``tile_rows`` rows ends where these rows end, so that it has no row of
    another expert. It shares rows with the tile before it.

    Each block lists the tiles of one expert, and counts the tiles before them itself. Invalid
    offsets change which rows are listed, but all tiles stay within ``rows`` and in the list.
    """
    limit = T.dynamic("limit")
    padded = ceil(experts / THREADS) * THREADS

    @T.prim_func
    def expert_tiles(
        offsets: T.Tensor((experts,), "int32"),
        rows: T.int32,
        tiles: T.Tensor((limit, 3), "int32"),
        counts: T.Tensor((2,), "int32"),
    ):
        with T.Kernel(experts, threads=THREADS) as expert:
            ends = T.alloc_shared((experts,), "int32")
            before = T.alloc_fragment((padded,), "int32")
            first = T.alloc_fragment((1,), "int32")
            for e in T.Parallel(experts):
                ends[e] = T.min(T.max(offsets[e], 0), rows)
            for e in T.Parallel(padded):
                before[e] = 0
                if e < expert:
                    before[e] = number_of(ends, e, tile_rows)
            T.reduce_sum(before, first)
            # Variables are opaque to TileLang's analyzer, which needs seconds for the expressions.
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            number = T.alloc_var("int32")
            begin = T.if_then_else(expert > 0, ends[T.max(expert - 1, 0)], 0)
            end = ends[expert]
            number = number_of(ends, expert, tile_rows)
            for i in T.serial(T.ceildiv(number, THREADS)):
                for t in T.Parallel(THREADS):
                    tile = i * THREADS + t
                    if tile < number and first[0] + tile < limit:
                        row = begin + tile * tile_rows
                        tiles[first[0] + tile, ROW] = T.max(T.min(row, end - tile_rows), begin)
                        tiles[first[0] + tile, END] = end
                        tiles[first[0] + tile, EXPERT] = expert
            if expert == experts - 1:
                counts[TILES] = T.min(first[0] + number, limit)
                counts[USED] = end

    return expert_tiles
