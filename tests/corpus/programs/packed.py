"""Packed rows: the rows of all sources are adjacent."""

import numpy as np
import tilelang.language as T

from tileweave import language as W

from .case import F32, case
from .ragged import routed

TILE = 2


@T.macro
def locate(table, me, first, counts, tiles, ranks, parts):
    """Compute where rows start: those of a part follow the part before, from a whole tile on, and
    are sorted by source.

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
