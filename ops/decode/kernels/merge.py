"""Merge parts of results, and send them to all ranks."""

from dataclasses import dataclass
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
        parts: parts of the splits of this rank, (items, splits, rows * sections, columns); None if
            no block merges.
        sums: parts of all ranks, (items, ranks, rows * sections, columns); None for one rank.
        lse: logarithms, (batch, heads), or None.
        out: (batch, heads * sections, width).
    """

    parts: Any
    sums: Any
    lse: Any
    out: Any


@dataclass(frozen=True)
class Rows:
    """Rows that a block merges, in registers.

    Attributes:
        total: weighted sum of the results of parts, then the result.
        weight: sum of the weights of parts.
        top, previous_top: largest logarithm to base 2 of the parts so far, and of those before the
            latest ones; at the end ``top`` is the logarithm of the result.
    """

    total: Any
    weight: Any
    top: Any
    previous_top: Any


@T.macro
def merge_heads(config, results, me, first):
    """Merge the parts of ``config.merge_rows`` sections of heads, beginning with section ``first``
    of those of all sequences."""
    item, row = first // config.part_rows, first % config.part_rows
    total = T.alloc_fragment((config.merge_rows, config.width), "float32")
    weight = T.alloc_fragment((config.merge_rows,), "float32")
    top = T.alloc_fragment((config.merge_rows,), "float32")
    previous_top = T.alloc_fragment((config.merge_rows,), "float32")
    rows = Rows(total, weight, top, previous_top)
    if config.merges_within:
        merge_in_registers(config, results.parts, (me, item), row, rows)
    else:
        merge(config, results.parts, config.splits, (me, item), row, rows)
    if config.ranks > 1:
        send(config, rows, results.sums, me, item, row)
        merge(config, results.sums, config.ranks, (me, item), row, rows)
    store(config, results, first, config.merge_rows, total, top)


@T.macro
def merge(config, parts, count, place, row, rows):
    """Merge ``count`` parts at a place of ``parts``."""
    R, held = config.merge_rows, config.parts_per_load(count)
    tile = T.alloc_shared((held, R, config.columns), "float32")
    T.clear(rows.total)
    T.clear(rows.weight)
    T.fill(rows.top, LOWEST)
    for step in T.serial(count // held):
        T.copy(parts[(*place, step * held, row, 0)], tile)
        T.copy(rows.top, rows.previous_top)
        for s in T.unroll(held):
            for i in T.Parallel(R):
                rows.top[i] = T.max(rows.top[i], tile[s, i, config.width])
        for i, j in T.Parallel(R, config.width):
            rows.total[i, j] *= T.exp2(rows.previous_top[i] - rows.top[i])
        for i in T.Parallel(R):
            rows.weight[i] *= T.exp2(rows.previous_top[i] - rows.top[i])
        for s in T.unroll(held):
            for i, j in T.Parallel(R, config.width):
                rows.total[i, j] += tile[s, i, j] * T.exp2(tile[s, i, config.width] - rows.top[i])
            for i in T.Parallel(R):
                rows.weight[i] += T.exp2(tile[s, i, config.width] - rows.top[i])
    for i, j in T.Parallel(R, config.width):
        rows.total[i, j] = T.if_then_else(rows.weight[i] > 0, rows.total[i, j] / rows.weight[i], 0)
    for i in T.Parallel(R):
        rows.top[i] += T.log2(rows.weight[i])


@T.macro
def merge_in_registers(config, parts, place, row, rows):
    """Merge the parts of the splits of an item. It needs no shared memory, which may still receive
    queries if the block has no keys."""
    R, held = config.merge_rows, config.parts_per_load(config.splits)
    lse = config.width
    T.clear(rows.total)
    T.clear(rows.weight)
    T.fill(rows.top, LOWEST)
    for step in T.serial(config.splits // held):
        for s in T.unroll(held):
            for i in T.Parallel(R):
                rows.top[i] = T.max(rows.top[i], parts[(*place, step * held + s, row + i, lse)])
    for step in T.serial(config.splits // held):
        for s in T.unroll(held):
            split = step * held + s
            for i, j in T.Parallel(R, config.width):
                rows.total[i, j] += parts[(*place, split, row + i, j)] * T.exp2(
                    parts[(*place, split, row + i, lse)] - rows.top[i]
                )
            for i in T.Parallel(R):
                rows.weight[i] += T.exp2(parts[(*place, split, row + i, lse)] - rows.top[i])
    for i, j in T.Parallel(R, config.width):
        rows.total[i, j] = T.if_then_else(rows.weight[i] > 0, rows.total[i, j] / rows.weight[i], 0)
    for i in T.Parallel(R):
        rows.top[i] += T.log2(rows.weight[i])


@T.macro
def send(config, rows, sums, me, item, row):
    """Store the merged rows to all ranks, the next one first."""
    part = T.alloc_shared((config.merge_rows, config.columns), "float32")
    for i, j in T.Parallel(config.merge_rows, config.width):
        part[i, j] = rows.total[i, j]
    for i, j in T.Parallel(config.merge_rows, config.columns - config.width):
        part[i, config.width + j] = rows.top[i]
    for step in T.serial(config.ranks):
        T.copy(part, sums[(me + 1 + step) % config.ranks, item, me, row, 0])


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
