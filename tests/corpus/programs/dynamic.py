"""Programs whose number of rows is known at launch."""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

from .case import F32, case, integers
from .collectives import ring_shift

SIZES = (20, 3, 32)


def rows_for(rng, ranks, size=None):
    """Return inputs of ``size`` rows; None: a random number of rows."""
    size = int(rng.choice(SIZES)) if size is None else size
    return [{"X": integers(rng, size, 32)} for _ in range(ranks)]


@case(sizes=SIZES)
class dynamic_shift:
    """``ring_shift`` with a dynamic number of rows."""

    N, b = 32, 8

    def make(ranks):
        M, N, b = T.dynamic("M"), dynamic_shift.N, dynamic_shift.b

        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(T.ceildiv(M, b), threads=32) as row:
                tile = T.alloc_shared((b, N), F32)
                T.copy(X[row * b, 0], tile)
                T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])
                T.copy(S[W.rank(), row * b, 0], tile)
                T.copy(tile, Y[row * b, 0])

        return program

    inputs = rows_for

    expected = ring_shift.expected


@case(sizes=SIZES)
class dynamic_gather:
    """An all-gather by loads, with a dynamic number of rows."""

    N, b = 32, 8

    def make(ranks):
        m, N, b = T.dynamic("m"), dynamic_gather.N, dynamic_gather.b

        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((ranks, m, N), F32)):
            with T.Kernel(T.ceildiv(m, b), threads=32) as row:
                shared = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((b, N), F32)
                me = W.rank()
                T.copy(X[row * b, 0], tile)
                T.copy(tile, shared[me, row * b, 0])
                for step in T.serial(ranks):
                    source = (me + step) % ranks
                    T.copy(shared[source, row * b, 0], tile)
                    T.copy(tile, Y[source, row * b, 0])

        return program

    inputs = rows_for

    def expected(inputs):
        return [{"Y": np.stack([i["X"] for i in inputs])} for _ in inputs]


@case(sizes=SIZES)
class dynamic_copies:
    """An all-gather by copy engines with a dynamic number of rows, which a kernel copies out."""

    N, b = 32, 8

    def make(ranks):
        m, N, b = T.dynamic("m"), dynamic_copies.N, dynamic_copies.b

        @T.prim_func
        def program(rows: W.Symmetric((ranks, m, N), F32), Y: T.Tensor((ranks, m, N), F32)):
            with T.Kernel(T.ceildiv(m, b), ranks, threads=32) as (row, step):
                tile = T.alloc_shared((b, N), F32)
                source = (W.rank() + step) % ranks
                T.copy(rows[W.rank(), source, row * b, 0], tile)
                T.copy(tile, Y[source, row * b, 0])

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((m, N), F32),
            rows: W.Symmetric((ranks, m, N), F32),
            Y: T.Tensor((ranks, m, N), F32),
        ):
            p.copy(rows[p.rank, p.rank], X)
            for peer in p.peers():
                p.copy(rows[peer, p.rank], X, stream="copies")
            p.launch(program, rows, Y)

        return plan

    inputs = rows_for

    expected = dynamic_gather.expected
