"""One-shot all-reduce: every rank writes its rows to all ranks, and each rank adds all of them.

The compiler infers one signal for each tile that is written and one wait before it is read, and
proves that two alternating buffers make the memory safe to use again in the next launch.

    python examples/patterns/one_shot_all_reduce.py
"""

import ml_dtypes
import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
ROWS, COLUMNS = 16, 64


def one_shot_all_reduce(rows, columns, ranks, block=8):
    """Y (rows, columns): the sum of X over all ranks, in the same order on each rank."""

    @T.prim_func
    def program(
        X: T.Tensor((rows, columns), "bfloat16"),
        Y: T.Tensor((rows, columns), "bfloat16"),
    ):
        with T.Kernel(rows // block, threads=128) as row:
            parts = W.alloc_symmetric((ranks, rows, columns), "bfloat16")
            tile = T.alloc_shared((block, columns), "bfloat16")
            total = T.alloc_fragment((block, columns), "float32")
            me = W.rank()

            T.copy(X[row * block, 0], tile)
            for step in T.serial(ranks):
                T.copy(tile, parts[(me + 1 + step) % ranks, me, row * block, 0])
            T.clear(total)
            for source in T.serial(ranks):
                for i, j in T.Parallel(block, columns):
                    total[i, j] += parts[me, source, row * block + i, j]
            T.copy(total, Y[row * block, 0])

    return program


example = one_shot_all_reduce(ROWS, COLUMNS, RANKS)


def inputs(ranks, rng):
    shape = ranks, ROWS, COLUMNS
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
