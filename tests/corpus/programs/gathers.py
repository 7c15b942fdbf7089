"""Gathers by copy engines, and accesses whose addresses or conditions are data."""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

from .case import F32, case, given, integers


@case()
class pulled_by_copies:
    """Copy engines of each rank pull the results of all other ranks, in two halves."""

    m, N, b = 16, 32, 4

    def make(ranks, m=m, N=N, b=b):
        @T.prim_func
        def double(X: T.Tensor((m, N), F32), S: W.Symmetric((m, N), F32)):
            with T.Kernel(m // b, threads=32) as row:
                for i, j in T.Parallel(b, N):
                    S[W.rank(), row * b + i, j] = X[row * b + i, j] * T.float32(2)

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((m, N), F32),
            S: W.Symmetric((m, N), F32),
            Y: T.Tensor((ranks, m, N), F32),
        ):
            p.launch(double, X, S)
            p.copy(Y[p.rank], S[p.rank])
            for peer in p.peers():
                for half in (slice(0, m // 2), slice(m // 2, m)):
                    p.copy(Y[peer, half], S[peer, half], stream="copies")

        return plan

    inputs = given(X=(m, N))

    def expected(inputs):
        Y = np.stack([i["X"] * 2 for i in inputs])
        return [{"Y": Y} for _ in inputs]


@case(mutated=3)
class packed_gather:
    """Copy engines gather the rows of all ranks; other tensors choose the number and place of the
    tiles that are read."""

    m, N, b, tiles = 12, 16, 4, 6

    def make(ranks, m=m, N=N, b=b, tiles=tiles):
        @T.prim_func
        def pick(
            first: T.Tensor((3,), "int32"),
            rows: T.Tensor((tiles,), "int32"),
            gathered: W.Symmetric((ranks, m, N), F32),
            Y: T.Tensor((tiles, b, N), F32),
        ):
            with T.Kernel(2, threads=32) as block:
                tile = T.alloc_shared((b, N), F32)
                me, begin = W.rank(), first[block]
                for step in T.Pipelined(first[block + 1] - begin, num_stages=2):
                    owner, row = rows[begin + step] // m, rows[begin + step] % m
                    T.copy(gathered[me, owner, row, 0], tile)
                    T.copy(tile, Y[begin + step, 0, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((m, N), F32),
            first: T.Tensor((3,), "int32"),
            rows: T.Tensor((tiles,), "int32"),
            gathered: W.Symmetric((ranks, m, N), F32),
            Y: T.Tensor((tiles, b, N), F32),
        ):
            for peer in p.peers():
                p.copy(gathered[peer, p.rank], X, stream="copies")
            p.copy(gathered[p.rank, p.rank], X)
            p.launch(pick, first, rows, gathered, Y)

        return plan

    def inputs(rng, ranks):
        m, N, b, tiles = (getattr(packed_gather, name) for name in ("m", "N", "b", "tiles"))
        # No rank reads the rows of its left neighbor.
        owners = [(r + rng.integers(0, 2, tiles)) % ranks for r in range(ranks)]
        return [
            {
                "X": integers(rng, m, N),
                "first": np.array([0, rng.integers(0, tiles + 1), tiles], np.int32),
                "rows": (o * m + rng.integers(0, m - b + 1, tiles)).astype(np.int32),
            }
            for o in owners
        ]

    def expected(inputs):
        gathered = np.stack([i["X"] for i in inputs])
        rows = gathered.reshape(-1, packed_gather.N)
        tile = np.arange(packed_gather.b)
        return [{"Y": rows[i["rows"][:, None] + tile], "gathered": gathered} for i in inputs]


@case(resident=4)
class scattered_loads:
    """Each rank publishes its rows in its own memory, then loads rows whose owner and index are
    data; a negative owner means no load."""

    m, N, b, count = 8, 16, 2, 5

    def make(ranks, m=m, N=N, b=b, count=count):
        @T.prim_func
        def program(
            X: T.Tensor((m, N), F32),
            owners: T.Tensor((m // b, count), "int32"),
            rows: T.Tensor((m // b, count), "int32"),
            Y: T.Tensor((m // b, count, N), F32),
        ):
            with T.Kernel(m // b, threads=32) as block:
                S = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((b, N), F32)
                row = T.alloc_shared((1, N), F32)
                T.copy(X[block * b, 0], tile)
                T.copy(tile, S[W.rank(), block * b, 0])
                for step in T.serial(count):
                    owner = owners[block, step]
                    if owner >= 0:
                        T.copy(S[owner, rows[block, step], 0], row)
                    else:
                        T.clear(row)
                    T.copy(row, Y[block, step, 0])

        return program

    def inputs(rng, ranks):
        m, N, b, count = (getattr(scattered_loads, name) for name in ("m", "N", "b", "count"))
        return [
            {
                "X": integers(rng, m, N),
                "owners": rng.integers(-1, ranks, (m // b, count)).astype(np.int32),
                "rows": rng.integers(0, m, (m // b, count)).astype(np.int32),
            }
            for _ in range(ranks)
        ]

    def expected(inputs):
        X = np.stack([i["X"] for i in inputs])
        return [
            {"Y": np.where(i["owners"][..., None] < 0, 0, X[i["owners"], i["rows"]])}
            for i in inputs
        ]


@case()
class data_decides:
    """Conditions and loop bounds depend on data that the left neighbor has put."""

    N = 8

    def make(ranks, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((N,), "int32"), S: W.Symmetric((N,), "int32"), Y: T.Tensor((N,), "int32")
        ):
            with T.Kernel(1, threads=32):
                me, i = W.rank(), T.get_thread_binding()
                T.copy(X, S[(me + 1) % ranks, 0])
                if i < N:
                    Y[i] = 0
                    if S[me, i] % 2 == 0:
                        Y[i] = -1
                    for step in T.serial(S[me, N - 1 - i]):
                        Y[i] += step

        return program

    def inputs(rng, ranks):
        return [{"X": rng.integers(0, 5, data_decides.N).astype(np.int32)} for _ in range(ranks)]

    def expected(inputs):
        sent = [inputs[r - 1]["X"] for r in range(len(inputs))]
        return [{"Y": s % 2 - 1 + s[::-1] * (s[::-1] - 1) // 2} for s in sent]
