"""Loops in one launch that use the same memory again, and persistent blocks."""

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import F32, case, given, integers
from .collectives import ring_shift


@case(resident=2)
class persistent:
    """Two persistent blocks share all tiles of a shift."""

    M, N, b = 40, 32, 8

    def make(ranks, M=M, N=N, b=b):
        tiles = M // b

        @T.prim_func
        def program(X: T.Tensor((M, N), F32), Y: T.Tensor((M, N), F32)):
            with T.Kernel(2, threads=32) as block:
                S = W.alloc_symmetric((M, N), F32)
                tile = T.alloc_shared((b, N), F32)
                for wave in T.serial(T.ceildiv(tiles, 2)):
                    row = wave * 2 + block
                    if row < tiles:
                        T.copy(X[row * b, 0], tile)
                        T.copy(tile, S[(W.rank() + 1) % ranks, row * b, 0])
                for wave in T.serial(T.ceildiv(tiles, 2)):
                    row = wave * 2 + 1 - block
                    if row < tiles:
                        T.copy(S[W.rank(), row * b, 0], tile)
                        T.copy(tile, Y[row * b, 0])

        return program

    inputs = given(X=(M, N))

    expected = ring_shift.expected


@case()
class two_shifts:
    """Three shifts in one launch: two through halves of one tensor, the third through another."""

    m, N = 8, 32

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(X: T.Tensor((m, N), F32), S: W.Symmetric((2, m, N), F32),
                    Y: T.Tensor((m, N), F32)):  # fmt: skip
            with T.Kernel(2, threads=32) as half:
                last = W.alloc_symmetric((m, N), F32)
                tile = T.alloc_shared((m, N // 2), F32)
                column = half * (N // 2)
                right = (W.rank() + 1) % ranks
                T.copy(X[0, column], tile)
                for iteration in T.serial(2):
                    T.copy(tile, S[right, iteration, 0, column])
                    T.copy(S[W.rank(), iteration, 0, column], tile)
                T.copy(tile, last[right, 0, column])
                T.copy(last[W.rank(), 0, column], tile)
                T.copy(tile, Y[0, column])

        return program

    inputs = given(X=(m, N))

    def expected(inputs):
        return [{"Y": inputs[(r - 3) % len(inputs)]["X"]} for r in range(len(inputs))]


@case(unread=("S",))
class uneven_loops:
    """Loops with 0 to 2 times 0 or 2 iterations, depending on rank and block, read each tile.

    No rank writes a tile that is never read.
    """

    blocks, b, N = 6, 4, 32

    def iterations(rank, block):
        return (rank + block) % 3, (rank + block) % 2 * 2

    def make(ranks, blocks=blocks, b=b, N=N):
        iterations = uneven_loops.iterations
        shape = blocks * b, N

        @T.prim_func
        def program(X: T.Tensor(shape, F32), S: W.Symmetric(shape, F32), Y: T.Tensor(shape, F32)):
            with T.Kernel(blocks, threads=32) as block:
                tile = T.alloc_shared((b, N), F32)
                total = T.alloc_fragment((b, N), F32)
                me, right = W.rank(), (W.rank() + 1) % ranks
                if iterations(right, block)[0] * iterations(right, block)[1] > 0:
                    T.copy(X[block * b, 0], tile)
                    T.copy(tile, S[right, block * b, 0])
                T.clear(total)
                for _ in T.serial(iterations(me, block)[0]):
                    for _ in T.serial(iterations(me, block)[1]):
                        T.copy(S[me, block * b, 0], tile)
                        for i, j in T.Parallel(b, N):
                            total[i, j] += tile[i, j]
                T.copy(total, Y[block * b, 0])

        return program

    inputs = given(X=(blocks * b, N))

    def expected(inputs):
        out = []
        for r in range(len(inputs)):
            few, many = uneven_loops.iterations(r, np.arange(uneven_loops.blocks))
            times = np.repeat(few * many, uneven_loops.b)[:, None]
            out.append({"Y": times * inputs[r - 1]["X"]})
        return out


@case(mutated=4)
class shift_again:
    """Three shifts in one launch through the same memory, which the caller reads afterwards."""

    m, N = 8, 32

    def make(ranks, m=m, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((m, N), F32), S: W.Symmetric((m, N), F32), Y: T.Tensor((m, N), F32)
        ):
            with T.Kernel(2, threads=32) as half:
                tile = T.alloc_shared((m, N // 2), F32)
                column = half * (N // 2)
                me, right = W.rank(), (W.rank() + 1) % ranks
                T.copy(X[0, column], tile)
                T.copy(tile, S[right, 0, column])
                T.copy(S[me, 0, column], tile)
                for _ in T.serial(2):
                    T.copy(tile, S[right, 0, column])
                    T.copy(S[me, 0, column], tile)
                T.copy(tile, Y[0, column])

        return program

    inputs = given(X=(m, N))

    def expected(inputs):
        shifted = [inputs[(r - 3) % len(inputs)]["X"] for r in range(len(inputs))]
        return [{"Y": x, "S": x} for x in shifted]


@case(ranks=(2, 3, 4, 5))
class ring_in_place:
    """A ring all-reduce through all chunks of a tensor that the caller reads afterwards.

    Reduce-scatter and all-gather both write each chunk but one.
    """

    N = 32

    def make(ranks, N=N):
        @T.prim_func
        def program(
            X: T.Tensor((ranks, N), F32), S: W.Symmetric((ranks, N), F32),
            Y: T.Tensor((ranks, N), F32),
        ):  # fmt: skip
            with T.Kernel(1, threads=32) as _:
                got = T.alloc_shared((N,), F32)
                own = T.alloc_shared((N,), F32)
                me, right = W.rank(), (W.rank() + 1) % ranks
                T.copy(X[me, 0:N], got)
                for step in T.serial(ranks - 1):
                    chunk = (me + ranks - step) % ranks
                    T.copy(got, S[right, chunk, 0])
                    T.copy(S[me, (chunk + ranks - 1) % ranks, 0], got)
                    T.copy(X[(chunk + ranks - 1) % ranks, 0:N], own)
                    for i in T.Parallel(N):
                        got[i] += own[i]
                T.copy(got, Y[right, 0:N])
                for step in T.serial(ranks - 1):
                    chunk = (right + ranks - step) % ranks
                    T.copy(got, S[right, chunk, 0])
                    T.copy(S[me, (chunk + ranks - 1) % ranks, 0], got)
                    T.copy(got, Y[(chunk + ranks - 1) % ranks, 0:N])

        return program

    def inputs(rng, ranks):
        return [{"X": integers(rng, ranks, ring_in_place.N)} for _ in range(ranks)]

    def expected(inputs):
        ranks, total = len(inputs), sum(i["X"] for i in inputs)
        once = [(r + 1) % ranks == np.arange(ranks)[:, None] for r in range(ranks)]
        return [{"Y": total, "S": total - o * i["X"]} for o, i in zip(once, inputs, strict=True)]


@case()
class add_again:
    """Sums that their owner clears, all ranks add to and the owner reads, in several iterations."""

    N, iterations = 32, 3

    def make(ranks, N=N, iterations=iterations):
        @T.prim_func
        def program(
            X: T.Tensor((iterations, N), F32),
            S: W.Symmetric((2, N), F32),
            Y: T.Tensor((iterations, N), F32),
        ):
            with T.Kernel(1, threads=32) as _:
                tile = T.alloc_shared((N,), F32)
                for iteration in T.serial(iterations):
                    T.clear(tile)
                    T.copy(tile, S[W.rank(), iteration % 2, 0])
                    T.copy(X[iteration, 0:N], tile)
                    for step in T.serial(ranks):
                        T.atomic_add(S[(W.rank() + step) % ranks, iteration % 2, 0], tile)
                    T.copy(S[W.rank(), iteration % 2, 0], Y[iteration, 0:N])

        return program

    inputs = given(X=(iterations, N))

    def expected(inputs):
        total = sum(i["X"] for i in inputs)
        return [{"Y": total, "S": np.stack([total[2], total[1]])} for _ in inputs]
