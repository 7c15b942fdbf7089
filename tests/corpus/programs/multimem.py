"""Multimem operations on symmetric tensors without explicit synchronization."""

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import F32, case, given


@case()
class multimem_loads:
    """Each rank publishes its rows in its own memory, and loads the sum over all ranks."""

    M, N, b = 16, 32, 8

    def make(ranks, M=M, N=N, b=b):
        @T.prim_func
        def program(X: T.Tensor((M, N), F32), Y: T.Tensor((M, N), F32)):
            with T.Kernel(M // b, threads=32) as block:
                S = W.alloc_symmetric((M, N), F32)
                tile = T.alloc_shared((b, N), F32)
                T.copy(X[block * b, 0], tile)
                T.copy(tile, S[W.rank(), block * b, 0])
                for i, j in T.Parallel(b, N // 4):
                    row, column = block * b + i, j * 4
                    Y[row, column : column + 4] = W.multimem_ld_reduce(
                        S[:, row, column], 4, op="add"
                    )

        return program

    inputs = given(X=(M, N))

    def expected(inputs):
        return [{"Y": sum(given["X"] for given in inputs)}] * len(inputs)


@case(resident=2, mutated=1)
class multimem_stores:
    """Each block stores its rows on all ranks, where the other block reads them."""

    M, N, b = 8, 32, 4

    def make(ranks, M=M, N=N, b=b):
        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32),
            S: W.Symmetric((ranks, M, N), F32),
            Y: T.Tensor((ranks, M, N), F32),
        ):
            with T.Kernel(2, threads=32) as block:
                tile = T.alloc_shared((b, N), F32)
                me, other = W.rank(), 1 - block
                T.copy(X[block * b, 0], tile)
                for i, j in T.Parallel(b, N // 4):
                    values = tile[i, j * 4 : j * 4 + 4]
                    W.multimem_st(S[:, me, block * b + i, j * 4], values)
                for step in T.serial(ranks):
                    source = (me + ranks - step) % ranks
                    T.copy(S[me, source, other * b, 0], tile)
                    T.copy(tile, Y[source, other * b, 0])

        return program

    inputs = given(X=(M, N))

    def expected(inputs):
        rows = np.stack([given["X"] for given in inputs])
        return [{"Y": rows, "S": rows}] * len(inputs)
