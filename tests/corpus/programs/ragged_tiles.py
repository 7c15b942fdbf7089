"""Ragged tensors whose readers wait for tiles of rows."""

import tilelang.language as T

from tileweave import language as W
from tileweave.passes import with_options

from .case import F32, case
from .ragged import received, routed


@case()
class ragged_tiles:
    """Readers start on the first tile of two rows while others are under way. Two blocks write the
    rows in any order, and the last tile of a segment has one row of capacity."""

    def make(ranks):
        messages, capacity, N = 8, 5, 8

        @T.prim_func
        def program(
            X: T.Tensor((messages, N), F32),
            dst: T.Tensor((messages,), "int32"),
            part: T.Tensor((messages,), "int32"),
            slot: T.Tensor((messages,), "int32"),
            counts: T.Tensor((ranks, 1), "int32"),
            Y: T.Tensor((1, ranks, capacity, N), F32),
        ):
            with T.Kernel(4, threads=32) as block:
                inbox = W.alloc_ragged((), rows=capacity, row=N)
                row = T.alloc_shared((1, N), F32)
                tile = T.alloc_shared((2, N), F32)
                me = W.rank()
                if block < 2:
                    if block == 0:
                        for peer in T.serial(ranks):
                            W.announce(inbox[peer, me, 0, 0], counts[peer, 0])
                    for step in T.serial(messages // 2):
                        t = step * 2 + block
                        if dst[t] >= 0:
                            T.copy(X[t, 0], row)
                            T.copy(row, inbox[dst[t], me, slot[t], 0])
                else:
                    for s in T.serial(ranks):
                        n = W.announced(inbox[me, s, 0, 0])
                        for step in T.serial(T.ceildiv(capacity, 2)):
                            if (step + block) % 2 == 0:
                                if step * 2 < n:
                                    T.copy(inbox[me, s, step * 2, 0], tile)
                                for i, j in T.Parallel(2, N):
                                    if step * 2 + i < capacity:
                                        Y[0, s, step * 2 + i, j] = T.if_then_else(
                                            step * 2 + i < n, tile[i, j], 0
                                        )

        return program

    def inputs(rng, ranks):
        return routed(rng, ranks, 1, 8, 5, 8)

    def expected(inputs):
        return [{"Y": received(inputs, me, 1, 5)[0]} for me in range(len(inputs))]


@case(resident=2)
class ragged_tile_results:
    """A block doubles the tiles that it receives, and one signal follows the rows of each result.
    The origin of a row waits for the tile that contains it."""

    def make(ranks):
        messages, capacity, N = 6, 4, 8

        @T.prim_func
        def program(
            X: T.Tensor((messages, N), F32),
            dst: T.Tensor((messages,), "int32"),
            part: T.Tensor((messages,), "int32"),
            slot: T.Tensor((messages,), "int32"),
            counts: T.Tensor((ranks, 1), "int32"),
            Y: T.Tensor((messages, N), F32),
        ):
            with T.Kernel(2, threads=32) as block:
                there = W.alloc_ragged((), rows=capacity, row=N)
                back = W.alloc_ragged((), rows=capacity, row=N)
                row = T.alloc_shared((1, N), F32)
                tile = T.alloc_shared((2, N), F32)
                doubled = T.alloc_shared((2, N), F32)
                me = W.rank()
                if block == 0:
                    for peer in T.serial(ranks):
                        W.announce(there[peer, me, 0, 0], counts[peer, 0])
                    for t in T.serial(messages):
                        if dst[t] >= 0:
                            T.copy(X[t, 0], row)
                            T.copy(row, there[dst[t], me, slot[t], 0])
                    for t in T.serial(messages):
                        T.clear(row)
                        if dst[t] >= 0:
                            T.copy(back[me, dst[t], slot[t], 0], row)
                        T.copy(row, Y[t, 0])
                else:
                    for s in T.serial(ranks):
                        n = W.announced(there[me, s, 0, 0])
                        W.announce(back[s, me, 0, 0], n)
                        for step in T.serial(T.ceildiv(n, 2)):
                            T.copy(there[me, s, step * 2, 0], tile)
                            for i, j in T.Parallel(2, N):
                                doubled[i, j] = tile[i, j] * 2
                            for i in T.serial(T.min(2, n - step * 2)):
                                for j in T.Parallel(N):
                                    back[s, me, step * 2 + i, j] = doubled[i, j]

        configs = {"tileweave.granule": {"back": (1, 2, N)}}
        return with_options(program, configs)

    def inputs(rng, ranks):
        return routed(rng, ranks, 1, 6, 4, 8)

    def expected(inputs):
        return [{"Y": i["X"] * 2 * (i["dst"] >= 0)[:, None]} for i in inputs]
