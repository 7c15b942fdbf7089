"""Average each point of a periodic 2-D field with its four neighbors, several times in one launch.

A grid of ranks shares the field. Each block keeps its tile in shared memory and exchanges only the
edges with the four neighboring blocks. The compiler infers one counter per edge and a separate copy
of the halos for each iteration, so no block waits for all others.

    python examples/patterns/halo_exchange_2d.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANK_GRID, BLOCK_GRID, TILE = (2, 2), (2, 1), (4, 8)  # rows and columns
RANKS, ITERATIONS = RANK_GRID[0] * RANK_GRID[1], 3
ROWS, COLUMNS = (blocks * size for blocks, size in zip(BLOCK_GRID, TILE, strict=True))
ABOVE, BELOW, LEFT, RIGHT = 0, 1, 0, 1  # halos that a block receives


def halo_exchange_2d(rank_grid, block_grid, tile_shape, iterations):
    (rank_rows, rank_columns), (block_rows, block_columns) = rank_grid, block_grid
    m, n = tile_shape
    shape = block_rows * m, block_columns * n

    def place(row, column):
        """Return the rank and the block of a tile; the field is periodic."""
        row, column = row % (rank_rows * block_rows), column % (rank_columns * block_columns)
        rank = row // block_rows * rank_columns + column // block_columns
        return rank, row % block_rows, column % block_columns

    @T.prim_func
    def program(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        # Neighbors wait for each other, so all blocks of a rank must run at the same time.
        with T.Kernel(block_columns, block_rows, threads=128) as (bx, by):
            halo_rows = W.alloc_symmetric((block_rows, block_columns, 2, n), "float32")
            halo_columns = W.alloc_symmetric((block_rows, block_columns, 2, m), "float32")
            tile = T.alloc_shared((m + 2, n + 2), "float32")
            mean = T.alloc_fragment((m, n), "float32")

            me = W.rank()
            row = me // rank_columns * block_rows + by
            column = me % rank_columns * block_columns + bx
            up, up_y, up_x = place(row + rank_rows * block_rows - 1, column)
            down, down_y, down_x = place(row + 1, column)
            left, left_y, left_x = place(row, column + rank_columns * block_columns - 1)
            right, right_y, right_x = place(row, column + 1)

            for i, j in T.Parallel(m, n):
                tile[i + 1, j + 1] = X[by * m + i, bx * n + j]
            for _ in T.serial(iterations):
                for j in T.Parallel(n):
                    halo_rows[up, up_y, up_x, BELOW, j] = tile[1, j + 1]
                    halo_rows[down, down_y, down_x, ABOVE, j] = tile[m, j + 1]
                for i in T.Parallel(m):
                    halo_columns[left, left_y, left_x, RIGHT, i] = tile[i + 1, 1]
                    halo_columns[right, right_y, right_x, LEFT, i] = tile[i + 1, n]
                for j in T.Parallel(n):
                    tile[0, j + 1] = halo_rows[me, by, bx, ABOVE, j]
                    tile[m + 1, j + 1] = halo_rows[me, by, bx, BELOW, j]
                for i in T.Parallel(m):
                    tile[i + 1, 0] = halo_columns[me, by, bx, LEFT, i]
                    tile[i + 1, n + 1] = halo_columns[me, by, bx, RIGHT, i]
                for i, j in T.Parallel(m, n):
                    mean[i, j] = 0.25 * (
                        tile[i, j + 1] + tile[i + 2, j + 1] + tile[i + 1, j] + tile[i + 1, j + 2]
                    )
                for i, j in T.Parallel(m, n):
                    tile[i + 1, j + 1] = mean[i, j]
            for i, j in T.Parallel(m, n):
                Y[by * m + i, bx * n + j] = tile[i + 1, j + 1]

    return program


example = halo_exchange_2d(RANK_GRID, BLOCK_GRID, TILE, ITERATIONS)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    shape = ROWS, COLUMNS
    return [{"X": rng.standard_normal(shape).astype(np.float32)} for _ in range(ranks)]


def reference(inputs: list[dict]) -> list[dict]:
    rank_rows, rank_columns = RANK_GRID
    parts = [rank_inputs["X"].astype(np.float64) for rank_inputs in inputs]
    field = np.block([parts[r * rank_columns : (r + 1) * rank_columns] for r in range(rank_rows)])
    for _ in range(ITERATIONS):
        field = sum(np.roll(field, by, axis) for by in (1, -1) for axis in (0, 1)) / 4
    rows = np.vsplit(field, rank_rows)
    return [{"Y": part} for row in rows for part in np.hsplit(row, rank_columns)]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    for output, expected in zip(outputs, reference(given), strict=True):
        assert np.allclose(output["Y"], expected["Y"], atol=1e-6)
    print(f"{RANKS} ranks averaged {ITERATIONS} times with the edges of their neighbors")


if __name__ == "__main__":
    main()
