"""Exchanges whose amounts and places are data: tensors of ``W.alloc_ragged``."""

from typing import NamedTuple

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import F32, case, integers


class Routing(NamedTuple):
    """Segment of each message of a rank, and the number of messages in each segment.

    Attributes:
        dst, part: storing rank of each message, -1 if it is dropped, and segment there.
        slot: row of each message in its segment.
        counts: (ranks, parts) number of messages.
    """

    dst: np.ndarray
    part: np.ndarray
    slot: np.ndarray
    counts: np.ndarray


def route(rng, ranks, parts, messages, capacity) -> Routing:
    """Route messages of a rank: uniformly, all to one segment, or nothing at all.

    Messages that exceed the capacity of a segment are dropped. Rows have a random order.
    """
    kind = rng.choice(["uniform", "one", "none"], p=[0.6, 0.3, 0.1])
    dst = rng.integers(-1 if kind == "uniform" else 0, ranks, messages)
    part = rng.integers(0, parts, messages)
    if kind == "one":
        dst[:], part[:] = dst[0], part[0]
    elif kind == "none":
        dst[:] = -1
    slot, counts = np.zeros(messages, np.int32), np.zeros((ranks, parts), np.int32)
    for d in range(ranks):
        for p in range(parts):
            here = np.flatnonzero((dst == d) & (part == p))
            dst[here[capacity:]] = -1
            here = here[:capacity]
            counts[d, p] = len(here)
            slot[here] = rng.permutation(len(here))
    return Routing(dst.astype(np.int32), part.astype(np.int32), slot, counts)


def received(inputs, me, parts, capacity):
    """Return the rows that rank ``me`` receives, (parts, ranks, capacity, N), and their numbers."""
    ranks, columns = len(inputs), inputs[0]["X"].shape[1]
    rows = np.zeros((parts, ranks, capacity, columns), np.float32)
    for source, i in enumerate(inputs):
        mine = np.flatnonzero(i["dst"] == me)
        rows[i["part"][mine], source, i["slot"][mine]] = i["X"][mine]
    return rows, np.stack([i["counts"][me] for i in inputs], axis=1)


def routed(rng, ranks, parts, messages, capacity, columns):
    """Return inputs: messages and their routing, for each rank."""
    return [
        {
            "X": integers(rng, messages, columns),
            **route(rng, ranks, parts, messages, capacity)._asdict(),
        }
        for _ in range(ranks)
    ]


@case()
class ragged_dispatch:
    """Tokens go to the experts' ranks. Blocks of the senders announce and send, and others
    receive."""

    def make(ranks):
        tokens, experts, capacity, N = 6, 2, 4, 8

        @T.prim_func
        def program(
            X: T.Tensor((tokens, N), F32),
            dst: T.Tensor((tokens,), "int32"),
            part: T.Tensor((tokens,), "int32"),
            slot: T.Tensor((tokens,), "int32"),
            counts: T.Tensor((ranks, experts), "int32"),
            Y: T.Tensor((experts, ranks, capacity, N), F32),
            C: T.Tensor((experts, ranks), "int32"),
        ):
            with T.Kernel(2 + experts, threads=32) as block:
                inbox = W.alloc_ragged(experts, rows=capacity, row=N)
                tile = T.alloc_shared((1, N), F32)
                me = W.rank()
                if block < 2:
                    for peer in T.serial(ranks):
                        if block == 0:
                            for e in T.serial(experts):
                                W.announce(inbox[peer, e, me, 0, 0], counts[peer, e])
                    for step in T.serial(tokens // 2):
                        t = step * 2 + block
                        if dst[t] >= 0:
                            T.copy(X[t, 0], tile)
                            T.copy(tile, inbox[dst[t], part[t], me, slot[t], 0])
                else:
                    for s in T.serial(ranks):
                        n = W.announced(inbox[me, block - 2, s, 0, 0])
                        C[block - 2, s] = n
                        for i in T.serial(n):
                            T.copy(inbox[me, block - 2, s, i, 0], tile)
                            T.copy(tile, Y[block - 2, s, i, 0])
                        T.clear(tile)
                        for i in T.serial(capacity - n):
                            T.copy(tile, Y[block - 2, s, n + i, 0])

        return program

    def inputs(rng, ranks):
        return routed(rng, ranks, 2, 6, 4, 8)

    def expected(inputs):
        both = [received(inputs, me, 2, 4) for me in range(len(inputs))]
        return [{"Y": rows, "C": numbers} for rows, numbers in both]


@case(resident=2)
class ragged_halves:
    """Each half of a row is a store of its own, by all threads, and rows are read in tiles of two,
    which may extend past the announced rows."""

    def make(ranks):
        messages, capacity, N = 5, 4, 16

        @T.prim_func
        def program(
            X: T.Tensor((messages, N), F32),
            dst: T.Tensor((messages,), "int32"),
            part: T.Tensor((messages,), "int32"),
            slot: T.Tensor((messages,), "int32"),
            counts: T.Tensor((ranks, 1), "int32"),
            Y: T.Tensor((1, ranks, capacity, N), F32),
        ):
            with T.Kernel(2, threads=32) as half:
                inbox = W.alloc_ragged((), rows=capacity, row=N)
                tile = T.alloc_fragment((2, N // 2), F32)
                me = W.rank()
                if half == 0:
                    for peer in T.serial(ranks):
                        W.announce(inbox[peer, me, 0, 0], counts[peer, 0])
                for t in T.serial(messages):
                    owner, row = dst[t], slot[t]
                    if owner >= 0:
                        for j in T.Parallel(N // 2):
                            inbox[owner, me, row, half * (N // 2) + j] = X[t, half * (N // 2) + j]
                for s in T.serial(ranks):
                    n = W.announced(inbox[me, s, 0, 0])
                    for step in T.serial(capacity // 2):
                        if step * 2 < n:
                            T.copy(inbox[me, s, step * 2, half * (N // 2)], tile)
                        for i, j in T.Parallel(2, N // 2):
                            Y[0, s, step * 2 + i, half * (N // 2) + j] = T.if_then_else(
                                step * 2 + i < n, tile[i, j], 0
                            )

        return program

    def inputs(rng, ranks):
        return routed(rng, ranks, 1, 5, 4, 16)

    def expected(inputs):
        return [{"Y": received(inputs, me, 1, 4)[0]} for me in range(len(inputs))]


@case(mutated=3)
class ragged_there_and_back:
    """The rows of a peer return to it, doubled: the second exchange sends what the first one
    delivered."""

    def make(ranks):
        messages, capacity, N = 5, 4, 8

        @T.prim_func
        def program(
            X: T.Tensor((messages, N), F32),
            dst: T.Tensor((messages,), "int32"),
            part: T.Tensor((messages,), "int32"),
            slot: T.Tensor((messages,), "int32"),
            counts: T.Tensor((ranks, 1), "int32"),
            Y: T.Tensor((messages, N), F32),
        ):
            with T.Kernel(1, threads=32):
                there = W.alloc_ragged((), rows=capacity, row=N)
                back = W.alloc_ragged((), rows=capacity, row=N)
                tile = T.alloc_shared((1, N), F32)
                doubled = T.alloc_shared((1, N), F32)
                me = W.rank()
                for peer in T.serial(ranks):
                    W.announce(there[peer, me, 0, 0], counts[peer, 0])
                for t in T.serial(messages):
                    if dst[t] >= 0:
                        T.copy(X[t, 0], tile)
                        T.copy(tile, there[dst[t], me, slot[t], 0])
                for s in T.serial(ranks):
                    W.announce(back[s, me, 0, 0], W.announced(there[me, s, 0, 0]))
                    for i in T.serial(W.announced(there[me, s, 0, 0])):
                        T.copy(there[me, s, i, 0], tile)
                        for j in T.Parallel(N):
                            doubled[0, j] = tile[0, j] * 2
                        T.copy(doubled, back[s, me, i, 0])
                for t in T.serial(messages):
                    if dst[t] >= 0:
                        T.copy(back[me, dst[t], slot[t], 0], tile)
                        T.copy(tile, Y[t, 0])
                    else:
                        T.clear(doubled)
                        T.copy(doubled, Y[t, 0])

        return program

    def inputs(rng, ranks):
        return routed(rng, ranks, 1, 5, 4, 8)

    def expected(inputs):
        return [{"Y": i["X"] * 2 * (i["dst"] >= 0)[:, None]} for i in inputs]


@case(ranks=(2, 3, 4))
class ragged_of_a_neighbor:
    """Each rank writes to its own memory, and its neighbors read the rows there, pipelined."""

    def make(ranks):
        capacity, N = 5, 8

        @T.prim_func
        def program(
            X: T.Tensor((capacity, N), F32),
            count: T.Tensor((1,), "int32"),
            Y: T.Tensor((capacity, N), F32),
        ):
            with T.Kernel(1, threads=128):
                outbox = W.alloc_ragged((), rows=capacity, row=N)
                sent = T.alloc_shared((1, N), F32)
                tile = T.alloc_shared((1, N), F32)
                me = W.rank()
                left = (me + ranks - 1) % ranks
                W.announce(outbox[me, me, 0, 0], count[0])
                for i in T.serial(count[0]):
                    T.copy(X[i, 0], sent)
                    T.copy(sent, outbox[me, me, i, 0])
                n = W.announced(outbox[left, left, 0, 0])
                for i in T.Pipelined(n, num_stages=2):
                    T.copy(outbox[left, left, i, 0], tile)
                    for j in T.Parallel(N):
                        Y[i, j] = tile[0, j]
                for i in T.serial(capacity - n):
                    for j in T.Parallel(N):
                        Y[n + i, j] = 0

        return program

    def inputs(rng, ranks):
        # One signal follows all rows, so a wait for one row less matters only for one row.
        return [
            {
                "X": integers(rng, 5, 8),
                "count": rng.choice([[1, 1, 1, 0], [5, 4, 3, 2]][rank % 2], 1).astype(np.int32),
            }
            for rank in range(ranks)
        ]

    def expected(inputs):
        def rows(i):
            return i["X"] * (np.arange(5) < i["count"][0])[:, None]

        return [{"Y": rows(inputs[me - 1])} for me in range(len(inputs))]
