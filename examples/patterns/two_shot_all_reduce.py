"""Two-shot all-reduce: each rank adds its own share of the rows, then writes the sums to all ranks.

The compiler infers a wait for each part before it is added, a signal for each sum, and the wait at
the end of the launch for the sums of the other ranks.

    python examples/patterns/two_shot_all_reduce.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
ROWS, COLUMNS = 64, 64


def two_shot_all_reduce(rows, columns, ranks, block=8):
    """Y (rows, columns): the sum of X over all ranks; rows is a multiple of ranks * block."""
    share = rows // ranks  # rows that one rank adds
    tiles = share // block

    @T.prim_func
    def program(
        X: T.Tensor((ranks, share, columns), "bfloat16"),
        Y: W.Symmetric((ranks, share, columns), "bfloat16"),
    ):
        with T.Kernel(ranks * tiles, threads=128) as index:
            parts = W.alloc_symmetric((ranks, share, columns), "bfloat16")
            tile = T.alloc_shared((block, columns), "bfloat16")
            total = T.alloc_fragment((block, columns), "float32")
            me = W.rank()
            owner, number = W.swizzle_ranks(index, tiles, me, ranks)
            row = number * block

            T.copy(X[owner, row, 0], tile)
            if owner != me:
                T.copy(tile, parts[owner, me, row, 0])
            else:
                T.copy(tile, total)
                for step in T.serial(ranks - 1):
                    T.copy(parts[me, (me + ranks - 1 - step) % ranks, row, 0], tile)
                    for i, j in T.Parallel(block, columns):
                        total[i, j] += tile[i, j]
                T.copy(total, tile)
                for step in T.serial(ranks):
                    T.copy(tile, Y[(me + 1 + step) % ranks, me, row, 0])

    return program


example = two_shot_all_reduce(ROWS, COLUMNS, RANKS)


def inputs(ranks, rng):
    shape = ranks, ranks, ROWS // ranks, COLUMNS
    return [{"X": X} for X in rng.standard_normal(shape).astype(ml_dtypes.bfloat16)]


def reference(inputs):
    total = sum(rank["X"].astype(np.float32) for rank in inputs)
    return [{"Y": total} for _ in inputs]


def main():
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=3)
    for output, expected in zip(outputs, reference(given), strict=True):
        np.testing.assert_allclose(output["Y"].astype(np.float32), expected["Y"], rtol=1e-2)
        assert (output["Y"] == outputs[0]["Y"]).all()
    print(f"each of {RANKS} ranks has the same sum of {ROWS} x {COLUMNS} elements")


if __name__ == "__main__":
    main()
