"""Broadcast a matrix from rank 0 along a chain of ranks, chunk by chunk.

Each rank forwards chunk c while its left neighbor sends chunk c + 1. The compiler infers one
counter per tile, so a block waits only for the tile that it forwards next.

    python examples/patterns/pipelined_broadcast.py
"""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

RANKS, M, N, CHUNKS, BLOCK_N = 4, 32, 64, 4, 32


def pipelined_broadcast(M, N, ranks, chunks, block_N):
    rows = M // chunks

    @T.prim_func
    def program(
        X: T.Tensor((M, N), "float32"),  # read on rank 0 only
        Y: W.Symmetric((M, N), "float32"),  # written on the other ranks
    ):
        with T.Kernel(N // block_N, threads=128) as block:
            tile = T.alloc_shared((rows, block_N), "float32")
            me = W.rank()
            column = block * block_N
            for chunk in T.serial(chunks):
                if me == 0:
                    T.copy(X[chunk * rows, column], tile)
                else:
                    T.copy(Y[me, chunk * rows, column], tile)
                if me < ranks - 1:
                    T.copy(tile, Y[me + 1, chunk * rows, column])

    return program


example = pipelined_broadcast(M, N, RANKS, CHUNKS, BLOCK_N)


def inputs(ranks: int, rng: np.random.Generator) -> list[dict]:
    return [{"X": rng.standard_normal((M, N)).astype(np.float32)} for _ in range(ranks)]


def reference(inputs: list[dict]) -> list[dict]:
    return [{}] + [{"Y": inputs[0]["X"]} for _ in inputs[1:]]


def main() -> None:
    given = inputs(RANKS, np.random.default_rng(0))
    outputs = tw.simulate(example, world_size=RANKS, inputs=given, schedules=5)
    for output, expected in zip(outputs[1:], reference(given)[1:], strict=True):
        assert (output["Y"] == expected["Y"]).all()
    print(f"{RANKS} ranks have the matrix of rank 0, sent in {CHUNKS} chunks")


if __name__ == "__main__":
    main()
