"""Shifts, all-gathers and reductions without explicit synchronization."""

import numpy as np
import tilelang.language as T

import tileweave as tw
from tileweave import language as W

from .case import F32, case, given, integers


@case()
class ring_shift:
    """Put rows to the right neighbor, then read the rows that the left one has put."""

    M, N, b = 16, 32, 8

    def make(ranks, M=M, N=N, b=b):
        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M // b, threads=32) as row:
                tile = T.alloc_shared((b, N), F32)
                T.copy(X[row * b, 0], tile)
                T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])
                T.copy(S[W.rank(), row * b, 0], tile)
                T.copy(tile, Y[row * b, 0])

        return program

    inputs = given(X=(M, N))

    def expected(inputs):
        return [{"Y": inputs[r - 1]["X"]} for r in range(len(inputs))]


@case()
class elementwise:
    """Each thread stores to the right neighbor and loads what the left one has stored."""

    M, N = 8, 32

    def make(ranks, M=M, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M // 4, threads=32) as block:
                right = (W.rank() + 1) % ranks
                for i, j in T.Parallel(4, N):
                    S[right, block * 4 + i, j] = X[block * 4 + i, j]
                for i, j in T.Parallel(4, N):
                    Y[block * 4 + i, j] = S[W.rank(), block * 4 + i, j]

        return program

    inputs = given(X=(M, N))

    expected = ring_shift.expected


@case(mutated=3)
class put_and_get:
    """``W.put_block`` sends rows to the right neighbor, where ``W.get_block`` fetches them."""

    M, N = 4, 32

    def make(ranks, M=M, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M, threads=32) as row:
                W.put_block(X[row, 0], S[(W.rank() + 1) % ranks, row, 0], N)
                W.get_block(S[(W.rank() + ranks - 1) % ranks, row, 0], Y[row, 0], N)

        return program

    inputs = given(X=(M, N))

    def expected(inputs):
        return [{"Y": inputs[r - 2 if len(inputs) > 1 else 0]["X"]} for r in range(len(inputs))]


@case()
class bulk_transfers:
    """``W.bulk_store`` sends rows to the right neighbor, which reads them by ``W.bulk_load``."""

    M, N = 4, 32

    def make(ranks, M=M, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((M, N), F32), S: W.Symmetric((M, N), F32), Y: T.Tensor((M, N), F32)
        ):
            with T.Kernel(M, threads=32) as row:
                tile = T.alloc_shared((N,), F32)
                full = T.alloc_barrier(32)
                T.copy(X[row, 0:N], tile)
                W.bulk_store(S[(W.rank() + 1) % ranks, row, 0], tile, N)
                W.bulk_commit()
                W.bulk_wait(0, read=True)
                W.bulk_load(tile, S[W.rank(), row, 0], N, full[0])
                T.mbarrier_arrive(full[0])
                T.mbarrier_wait_parity(full[0], 0)
                T.copy(tile, Y[row, 0:N])

        return program

    inputs = given(X=(M, N))

    expected = ring_shift.expected


@case()
class two_kernels:
    """A plan of two shifts through the same tensor, with a local kernel between them."""

    def make(ranks):
        M, N = ring_shift.M, ring_shift.N
        shift, again = ring_shift.make(ranks), ring_shift.make(ranks)

        @T.prim_func
        def double(X: T.Tensor((M, N), F32), Y: T.Tensor((M, N), F32)):
            with T.Kernel(M, threads=32) as row:
                for i in T.Parallel(N):
                    Y[row, i] = 2.0 * X[row, i]

        @tw.plan
        def plan(
            p: tw.PlanBuilder,
            X: T.Tensor((M, N), F32),
            S: W.Symmetric((M, N), F32),
            once: T.Tensor((M, N), F32),
            doubled: T.Tensor((M, N), F32),
            Y: T.Tensor((M, N), F32),
        ):
            p.launch(shift, X, S, once)
            p.launch(double, once, doubled)
            p.launch(again, doubled, S, Y)

        return plan

    inputs = ring_shift.inputs

    def expected(inputs):
        return [{"Y": 2 * inputs[(r - 2) % len(inputs)]["X"]} for r in range(len(inputs))]


@case()
class all_gather_loads:
    """Each rank publishes its rows in its own memory and loads the rows of all ranks."""

    m, N, b = 8, 32, 8

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((ranks * m, N), F32)):
            with T.Kernel(2, threads=32) as half:
                shared = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((m, N // 2), F32)
                me = W.rank()
                T.copy(X[0, half * (N // 2)], tile)
                T.copy(tile, shared[me, 0, half * (N // 2)])
                for step in T.serial(ranks):
                    source = (me + step) % ranks
                    T.copy(shared[source, 0, half * (N // 2)], tile)
                    T.copy(tile, Y[source * m, half * (N // 2)])

        return program

    inputs = given(X=(m, N))

    def expected(inputs):
        return [{"Y": np.concatenate([i["X"] for i in inputs])} for _ in inputs]


@case()
class own_in_place:
    """Blocks of a 3-D grid load remote rows from their owners, and own rows from the input."""

    m, N, b = 16, 32, 8

    def make(ranks, m=m, N=N, b=b):
        @T.prim_func
        def program(X: T.Tensor((m, N), F32), Y: T.Tensor((ranks * m, N), F32)):
            with T.Kernel(2, m // b, ranks, threads=32) as (bx, by, bz):
                shared = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((b, N // 2), F32)
                me = W.rank()
                row, column = by * b, bx * (N // 2)
                source = (me + bz) % ranks
                if source == me:
                    T.copy(X[row, column], tile)
                    T.copy(tile, shared[me, row, column])
                else:
                    T.copy(shared[source, row, column], tile)
                T.copy(tile, Y[source * m + row, column])

        return program

    inputs = given(X=(m, N))

    expected = all_gather_loads.expected


@case()
class all_to_all_transposed:
    """Rank r receives the r-th column block of all ranks, transposed."""

    m, n = 16, 8

    def make(ranks, m=m, n=n):
        @T.prim_func
        def program(
            X: T.Tensor((m, n * ranks), F32), R: W.Symmetric((ranks, n, m), F32),
            Y: T.Tensor((n, m * ranks), F32),
        ):  # fmt: skip
            with T.Kernel(ranks, threads=32) as block:
                tile = T.alloc_shared((m, n), F32)
                transposed = T.alloc_shared((n, m), F32)
                me = W.rank()
                to = (me + 1 + block) % ranks
                T.copy(X[0, to * n], tile)
                for i, j in T.Parallel(n, m):
                    transposed[i, j] = tile[j, i]
                T.copy(transposed, R[to, me, 0, 0])
                source = (me + ranks - 1 - block) % ranks
                T.copy(R[me, source, 0, 0], transposed)
                T.copy(transposed, Y[0, source * m])

        return program

    def inputs(rng, ranks):
        shape = all_to_all_transposed.m, all_to_all_transposed.n * ranks
        return [{"X": integers(rng, *shape)} for _ in range(ranks)]

    def expected(inputs):
        n = all_to_all_transposed.n
        return [
            {"Y": np.concatenate([i["X"][:, r * n : (r + 1) * n].T for i in inputs], axis=1)}
            for r in range(len(inputs))
        ]


@case()
class ring_all_reduce:
    """Ring reduce-scatter and all-gather through memory for one chunk."""

    m, N = 4, 32

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(X: T.Tensor((ranks * m, N), F32), Y: T.Tensor((ranks * m, N), F32)):
            with T.Kernel(2, threads=32) as half:
                S = W.alloc_symmetric((m, N), F32)
                got = T.alloc_shared((m, N // 2), F32)
                own = T.alloc_shared((m, N // 2), F32)
                column = half * (N // 2)
                me, right = W.rank(), (W.rank() + 1) % ranks
                T.copy(X[me * m, column], got)
                for step in T.serial(ranks - 1):
                    chunk = (me + 2 * ranks - 1 - step) % ranks
                    T.copy(got, S[right, 0, column])
                    T.copy(S[me, 0, column], got)
                    T.copy(X[chunk * m, column], own)
                    for i, j in T.Parallel(m, N // 2):
                        got[i, j] += own[i, j]
                T.copy(got, Y[right * m, column])
                for step in T.serial(ranks - 1):
                    chunk = (me + ranks - step) % ranks
                    T.copy(got, S[right, 0, column])
                    T.copy(S[me, 0, column], got)
                    T.copy(got, Y[chunk * m, column])

        return program

    def inputs(rng, ranks):
        m, N = ring_all_reduce.m, ring_all_reduce.N
        return [{"X": integers(rng, ranks * m, N)} for _ in range(ranks)]

    def expected(inputs):
        return [{"Y": sum(i["X"] for i in inputs)} for _ in inputs]


@case()
class reduce_scatter_tails:
    """TMA additions into memory that its owner clears first; both axes have tails."""

    m, N, b = 12, 40, 16

    def make(ranks, m=m, N=N, b=b):
        @T.prim_func
        def program(X: T.Tensor((ranks, m, N), F32), Y: W.Symmetric((m, N), F32)):
            with T.Kernel(T.ceildiv(N, b), T.ceildiv(m, 8), threads=32) as (bx, by):
                tile = T.alloc_shared((8, b), F32)
                T.clear(tile)
                T.copy(tile, Y[W.rank(), by * 8, bx * b])
                for step in T.serial(ranks):
                    owner = (W.rank() + 1 + step) % ranks
                    T.copy(X[owner, by * 8 : by * 8 + 8, bx * b : bx * b + b], tile)
                    T.atomic_add(Y[owner, by * 8, bx * b], tile, use_tma=True)

        return program

    def inputs(rng, ranks):
        m, N = reduce_scatter_tails.m, reduce_scatter_tails.N
        return [{"X": integers(rng, ranks, m, N)} for _ in range(ranks)]

    def expected(inputs):
        return [{"Y": total} for total in sum(i["X"] for i in inputs)]


@case()
class reduce_scatter_bulk:
    """Reduce-scatter of rows by ``W.bulk_reduce``."""

    m, N = 6, 32

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(X: T.Tensor((ranks, m, N), F32), Y: W.Symmetric((m, N), F32)):
            with T.Kernel(m, threads=32) as row:
                tile = T.alloc_shared((N,), F32)
                me = W.rank()
                for i in T.Parallel(N):
                    Y[me, row, i] = 0.0
                for step in T.serial(ranks):
                    owner = (me + 1 + step) % ranks
                    T.copy(X[owner, row, 0:N], tile)
                    W.bulk_reduce(Y[owner, row, 0], tile, N)
                    W.bulk_commit()
                    W.bulk_wait(0, read=True)

        return program

    def inputs(rng, ranks):
        m, N = reduce_scatter_bulk.m, reduce_scatter_bulk.N
        return [{"X": integers(rng, ranks, m, N)} for _ in range(ranks)]

    expected = reduce_scatter_tails.expected
