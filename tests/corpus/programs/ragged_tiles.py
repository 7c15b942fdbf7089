"""Ragged tensors and packed rows, whose readers wait for tiles of rows."""

import numpy as np
import tilelang.language as T

from tileweave import language as W
from tileweave.passes import with_options

from .case import F32, case
from .ragged import received, routed

TILE = 2
"""Rows of a tile of packed rows."""


@case()
class ragged_tiles:
    """Readers start on the first tile of two rows while others are under way. Two blocks write the
    rows in any order, and the last tile of a segment has one row of capacity."""

    @staticmethod
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

    @staticmethod
    def inputs(rng, ranks):
        return routed(rng, ranks, 1, 8, 5, 8)

    @staticmethod
    def expected(inputs):
        return [{"Y": received(inputs, me, 1, 5)[0]} for me in range(len(inputs))]


@case(resident=2)
class ragged_tile_results:
    """A block doubles the tiles that it receives, and one signal follows the rows of each result.
    The origin of a row waits for the tile that contains it."""

    @staticmethod
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

    @staticmethod
    def inputs(rng, ranks):
        return routed(rng, ranks, 1, 6, 4, 8)

    @staticmethod
    def expected(inputs):
        return [{"Y": i["X"] * 2 * (i["dst"] >= 0)[:, None]} for i in inputs]


@T.macro
def locate(table, me, first, counts, tiles, ranks, parts):
    """Compute where rows start. The rows of a part are sorted by source, and start at the first
    tile after the part before.

    Args:
        table: (ranks, source, owner, part) numbers of rows.
        first: receives the first row that this rank writes, by owner and part.
        counts: receives the number of rows of each part of this rank.
        tiles: receives the first tile of each part of this rank, and the number of all tiles.
    """
    row = T.alloc_local((1,), "int32")
    begin = T.alloc_local((1,), "int32")
    for owner in T.serial(ranks):
        row[0] = 0
        for part in T.serial(parts):
            begin[0] = row[0]
            for source in T.serial(ranks):
                if source == me:
                    first[owner * parts + part] = row[0]
                row[0] += table[me, source, owner, part]
            if owner == me:
                counts[part] = row[0] - begin[0]
                tiles[part] = begin[0] // TILE
            row[0] = T.ceildiv(row[0], TILE) * TILE
        if owner == me:
            tiles[parts] = row[0] // TILE


def packed(inputs, me, parts, capacity):
    """Return the rows that rank ``me`` receives, (capacity, N); padding is zero."""
    rows, start = np.zeros((capacity, inputs[0]["X"].shape[1]), np.float32), 0
    for part in range(parts):
        for i in inputs:
            here = np.flatnonzero((i["dst"] == me) & (i["part"] == part))
            rows[start + i["slot"][here]] = i["X"][here]
            start += len(here)
        start = -(-start // TILE) * TILE
    return rows


@case()
class ragged_packed:
    """All ranks exchange their numbers of rows. Two blocks send, and two others read tiles, which
    contain rows of several sources."""

    @staticmethod
    def make(ranks):
        messages, parts, N = 5, 2, 8
        capacity = messages * ranks + parts * TILE

        @T.prim_func
        def program(
            X: T.Tensor((messages, N), F32),
            dst: T.Tensor((messages,), "int32"),
            part: T.Tensor((messages,), "int32"),
            slot: T.Tensor((messages,), "int32"),
            counts: T.Tensor((ranks, parts), "int32"),
            Y: T.Tensor((capacity, N), F32),
        ):
            with T.Kernel(4, threads=32) as block:
                table = W.alloc_symmetric((ranks, ranks, parts), "int32")
                inbox = W.alloc_packed(rows=capacity, row=N)
                first = T.alloc_local((ranks * parts,), "int32")
                received = T.alloc_local((parts,), "int32")
                tiles = T.alloc_local((parts + 1,), "int32")
                sent = T.alloc_shared((1, N), F32)
                tile = T.alloc_shared((TILE, N), F32)
                me = W.rank()
                if block == 0:
                    for peer in T.serial(ranks):
                        for owner in T.serial(ranks):
                            for p in T.serial(parts):
                                table[peer, me, owner, p] = counts[owner, p]
                locate(table, me, first, received, tiles, ranks, parts)
                if block == 0:
                    for p in T.serial(parts):
                        end = tiles[p] * TILE + received[p]
                        after = T.if_then_else(p == parts - 1, capacity, tiles[p + 1] * TILE)
                        W.pad(inbox[me, end, 0], after - end)
                if block < 2:
                    for step in T.serial(T.ceildiv(messages, 2)):
                        t = step * 2 + block
                        if t < messages:
                            if dst[t] >= 0:
                                T.copy(X[t, 0], sent)
                                row = first[dst[t] * parts + part[t]] + slot[t]
                                T.copy(sent, inbox[dst[t], row, 0])
                else:
                    for p in T.serial(parts):
                        for step in T.serial(tiles[p + 1] - tiles[p]):
                            if (step + block) % 2 == 0:
                                T.copy(inbox[me, (tiles[p] + step) * TILE, 0], tile)
                                for i, j in T.Parallel(TILE, N):
                                    Y[(tiles[p] + step) * TILE + i, j] = T.if_then_else(
                                        step * TILE + i < received[p], tile[i, j], 0
                                    )
                    if block == 2:
                        for step in T.serial(T.ceildiv(capacity, TILE) - tiles[parts]):
                            for i, j in T.Parallel(TILE, N):
                                Y[(tiles[parts] + step) * TILE + i, j] = 0

        return program

    @staticmethod
    def inputs(rng, ranks):
        return routed(rng, ranks, 2, 5, 5, 8)

    @staticmethod
    def expected(inputs):
        capacity = 5 * len(inputs) + 2 * TILE
        return [{"Y": packed(inputs, me, 2, capacity)} for me in range(len(inputs))]
