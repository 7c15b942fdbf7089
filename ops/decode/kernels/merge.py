"""Merge partial results, and send them to all ranks."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from .config import LOG2_E

LOWEST = -1e30
"""Lower bound of logarithms and of products of q and k. It is finite, so that the difference of two
maxima without keys is 0 and not NaN."""


@dataclass(frozen=True)
class Results:
    """Tensors that a program writes.

    Attributes:
        partials: results of the splits of this rank, (items, splits, rows * sections, columns);
            None for one split.
        sums: results of all ranks, (items, ranks, rows * sections, columns); None for one rank.
        lse: logarithms, (batch, heads), or None.
        out: (batch, heads * sections, width).
    """

    partials: Any
    sums: Any
    lse: Any
    out: Any


@dataclass(frozen=True)
class Rows:
    """Rows that a block merges, in registers.

    Attributes:
        out: weighted sum of the partial results, then the result.
        weight: sum of the weights of partials.
        lse: largest logarithm to base 2 of the partials so far, then that of the result.
    """

    out: Any
    weight: Any
    lse: Any


@T.macro
def alloc_rows(config, count):
    """Allocate ``Rows`` for ``count`` sections, and set them to those of no keys."""
    out = T.alloc_fragment((count, config.width), "float32")
    weight = T.alloc_fragment((count,), "float32")
    lse = T.alloc_fragment((count,), "float32")
    T.clear(out)
    T.clear(weight)
    T.fill(lse, LOWEST)
    return Rows(out, weight, lse)


@T.macro
def merge_splits(config, partials, me, item, row):
    """Merge the partials of an item on this rank, and return ``config.merge_rows`` rows of the
    result, beginning with row ``row`` of the item."""
    R, per_load, width = config.merge_rows, config.splits_per_load, config.width
    rows, steps, last = alloc_rows(config, R), ceil(config.splits / per_load), config.splits - 1
    for step in T.serial(steps):
        for s in T.unroll(per_load):
            for i in T.Parallel(R):
                split = T.min(step * per_load + s, last)
                rows.lse[i] = T.max(rows.lse[i], partials[me, item, split, row + i, width])
    for step in T.serial(steps):
        for s in T.unroll(per_load):
            number = step * per_load + s
            split = T.min(number, last)
            for i, j in T.Parallel(R, width):
                lse = partials[me, item, split, row + i, width]
                weight = weight_of(rows, i, lse, number <= last)
                rows.out[i, j] += partials[me, item, split, row + i, j] * weight
            for i in T.Parallel(R):
                lse = partials[me, item, split, row + i, width]
                rows.weight[i] += weight_of(rows, i, lse, number <= last)
    divide(config, R, rows)
    return rows


def weight_of(rows: Rows, i: Any, lse: Any, is_valid: Any) -> Any:
    """Return the weight of a partial with logarithm ``lse`` in row ``i``."""
    return T.if_then_else(is_valid, T.exp2(lse - rows.lse[i]), 0)


@T.macro
def merge_ranks(config, sums, me, item, row):
    """Merge the results of all ranks, and return ``config.rank_rows`` rows of the result, beginning
    with row ``row`` of the item. Each word is polled once, so the threads share them in shared
    memory."""
    R, per_load, width = config.rank_rows, config.ranks_per_load, config.width
    rows = alloc_rows(config, R)
    previous = T.alloc_fragment((R,), "float32")
    tile = T.alloc_shared((per_load, R, config.columns), "float32")
    for step in T.serial(config.ranks // per_load):
        T.copy(sums[me, item, step * per_load, row, 0], tile)
        T.copy(rows.lse, previous)
        for s in T.unroll(per_load):
            for i in T.Parallel(R):
                rows.lse[i] = T.max(rows.lse[i], tile[s, i, width])
        for i, j in T.Parallel(R, width):
            rows.out[i, j] *= T.exp2(previous[i] - rows.lse[i])
        for i in T.Parallel(R):
            rows.weight[i] *= T.exp2(previous[i] - rows.lse[i])
        for s in T.unroll(per_load):
            for i, j in T.Parallel(R, width):
                rows.out[i, j] += tile[s, i, j] * T.exp2(tile[s, i, width] - rows.lse[i])
            for i in T.Parallel(R):
                rows.weight[i] += T.exp2(tile[s, i, width] - rows.lse[i])
    divide(config, R, rows)
    return rows


@T.macro
def divide(config, count, rows):
    """Divide the weighted sums of ``count`` rows by the sums of weights, and compute the
    logarithms. Without keys the results are zeros and minus infinity."""
    for i, j in T.Parallel(count, config.width):
        rows.out[i, j] = T.if_then_else(rows.weight[i] > 0, rows.out[i, j] / rows.weight[i], 0)
    for i in T.Parallel(count):
        rows.lse[i] += T.log2(rows.weight[i])


@T.macro
def send(config, sums, me, item, row, rows, out, lse):
    """Store ``rows`` rows of the part of this rank to all ranks, the next one first."""
    for step in T.serial(config.ranks):
        rank = (me + 1 + step) % config.ranks
        store_part(config, sums, (rank, item, me), row, rows, out, lse)


@T.macro
def store_part(config, partials, place, row, rows, out, lse):
    """Store ``rows`` heads or sections of heads and their logarithms at index ``place`` of
    ``partials``, beginning with section ``row``."""
    columns, width = out.shape[1], config.width
    for i, j in T.Parallel(*out.shape):
        if i < rows:
            section = row + (i * columns + j) // width
            partials[(*place, section, j % width)] = out[i, j]
            if j % width < config.columns - width:
                partials[(*place, section, width + j % width)] = lse[i]


@T.macro
def store(config, results, first, rows, out, lse):
    """Store the results of ``rows`` heads or sections of heads, beginning with section ``first``.
    Also store their logarithms if the program returns them."""
    columns, width = out.shape[1], config.width
    sections = config.heads * config.sections
    for i, j in T.Parallel(*out.shape):
        if i < rows:
            section = first % sections + (i * columns + j) // width
            results.out[first // sections, section, j % width] = out[i, j]
    if config.has_lse:
        for i in T.Parallel(out.shape[0]):
            section = first % sections + i * columns // width
            if i < rows and section % config.sections == 0:
                head = section // config.sections
                results.lse[first // sections, head] = lse[i] / LOG2_E
