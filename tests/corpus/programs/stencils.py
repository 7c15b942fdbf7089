"""Readers whose tiles differ from the tiles that are written."""

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import F32, case, given
from .collectives import ring_shift


@case(unread=("halo",))
class halo_exchange:
    """A three-point stencil over rows that are split between ranks; beyond both ends are zeros."""

    m, N = 8, 32

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((m, N), F32), halo: W.Symmetric((2, N), F32), Y: T.Tensor((m, N), F32)
        ):
            with T.Kernel(1, threads=32) as _:
                rows = T.alloc_shared((m + 2, N), F32)
                me = W.rank()
                T.clear(rows)
                T.copy(X, rows[1 : m + 1, 0:N])
                if me > 0:
                    T.copy(rows[1:2, 0:N], halo[me - 1, 1:2, 0:N])
                if me < ranks - 1:
                    T.copy(rows[m : m + 1, 0:N], halo[me + 1, 0:1, 0:N])
                if me > 0:
                    T.copy(halo[me, 0:1, 0:N], rows[0:1, 0:N])
                if me < ranks - 1:
                    T.copy(halo[me, 1:2, 0:N], rows[m + 1 : m + 2, 0:N])
                for i, j in T.Parallel(m, N):
                    Y[i, j] = rows[i, j] + rows[i + 1, j] + rows[i + 2, j]

        return program

    inputs = given(X=(m, N))

    def expected(inputs):
        m = halo_exchange.m
        zeros = np.zeros((1, halo_exchange.N), np.float32)
        X = np.concatenate([zeros, *(i["X"] for i in inputs), zeros])
        Y = X[:-2] + X[1:-1] + X[2:]
        return [{"Y": Y[r * m : (r + 1) * m]} for r in range(len(inputs))]


@case()
class two_producers:
    """Two blocks write the halves of each granule that a third block reads as one tile."""

    m, N = 8, 32

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((m, N), F32)):
            with T.Kernel(3, threads=32) as block:
                S = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((4, N // 2), F32)
                whole = T.alloc_shared((4, N), F32)
                right = (W.rank() + 1) % ranks
                if block < 2:
                    for part in T.serial(m // 4):
                        T.copy(X[part * 4, block * (N // 2)], tile)
                        T.copy(tile, S[right, part * 4, block * (N // 2)])
                else:
                    for part in T.serial(m // 4):
                        T.copy(S[W.rank(), part * 4, 0], whole)
                        T.copy(whole, Y[part * 4, 0])

        return program

    inputs = given(X=(m, N))

    expected = ring_shift.expected


@case()
class wide_reader:
    """A tile that is read spans several tiles that are written; both axes have tails."""

    M, N = 20, 40

    def make(ranks, M=M, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(T.ceildiv(N, 16), T.ceildiv(M, 8), threads=32) as (bx, by):
                tile = T.alloc_shared((8, 16), F32)
                wide = T.alloc_shared((16, 32), F32)
                T.copy(X[by * 8, bx * 16], tile)
                T.copy(tile, S[(W.rank() + 1) % ranks, by * 8, bx * 16])
                if (bx % 2 == 1 or bx == 2) and (by % 2 == 1 or by == 2):
                    row, column = by // 2 * 16, bx // 2 * 32
                    T.copy(S[W.rank(), row, column], wide)
                    T.copy(wide, Y[row, column])

        return program

    inputs = given(X=(M, N))

    expected = ring_shift.expected
