"""Look up rows of a table that its callers fill, such as an embedding split over ranks.

The rows to read are data, and the caller writes the table between launches. The compiler sees
neither that write nor the next one, so the program has two explicit barriers.

    python examples/patterns/pull_rows.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS = 4
ROWS, D, TOKENS = 16, 32, 8  # ROWS: of the table, on one rank; D: features


@T.prim_func
def fill(X: T.Tensor((ROWS, D), "float32"), table: W.Symmetric((ROWS, D), "float32")):
    with T.Kernel(1, threads=32) as _:
        rows = T.alloc_shared((ROWS, D), "float32")
        T.copy(X, rows)
        T.copy(rows, table[W.rank(), 0, 0])


@T.prim_func
def pull(
    table: W.Symmetric((ROWS, D), "float32"),
    ids: T.Tensor((TOKENS,), "int32"),  # rows of the whole table
    Y: T.Tensor((TOKENS, D), "float32"),
):
    with T.Kernel(TOKENS, threads=32) as token:
        row = T.alloc_shared((1, D), "float32")
        W.barrier_blocks()  # all callers have filled their tables
        T.copy(table[ids[token] // ROWS, ids[token] % ROWS, 0], row)
        T.copy(row, Y[token, 0])
        W.barrier_blocks()  # all rows have been read: the callers may fill the tables again


@tw.plan
def example(
    p: tw.PlanBuilder,
    X: T.Tensor((ROWS, D), "float32"),
    table: W.Symmetric((ROWS, D), "float32"),
    ids: T.Tensor((TOKENS,), "int32"),
    Y: T.Tensor((TOKENS, D), "float32"),
):
    p.launch(fill, X, table)
    p.launch(pull, table, ids, Y)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    return [
        {
            "X": rng.standard_normal((ROWS, D)).astype(np.float32),
            "ids": rng.integers(0, ranks * ROWS, TOKENS).astype(np.int32),
        }
        for _ in range(ranks)
    ]


def reference(inputs: list[dict]) -> list[dict]:
    table = np.concatenate([rank_inputs["X"] for rank_inputs in inputs])
    return [{"Y": table[rank_inputs["ids"]]} for rank_inputs in inputs]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    for output, expected in zip(outputs, reference(given), strict=True):
        assert (output["Y"] == expected["Y"]).all()
    print(f"each of {RANKS} ranks has read {TOKENS} of {RANKS * ROWS} rows")


if __name__ == "__main__":
    main()
