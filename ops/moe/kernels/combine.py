"""Tile program of ``combine``: the ranks of the experts add rows, the owners of tokens the sums.

Each rank stores the weights of its tokens on all ranks. Then, for one chunk of tokens after the
other, it adds the rows of every rank's tokens at its experts, and the sums of all ranks for its own
tokens::

    rank 0 | store weights | chunk 0: add rows | add sums | chunk 1: add rows | add sums | ...
    rank 1 | store weights | chunk 0: add rows | add ...
                           ^ wait for weights  ^ wait for the sums of each rank in the chunk

Either the ranks of the experts store the sums on the rank of the tokens, or that rank loads them.
Blocks of several chunks run at the same time: some are limited by memory, as they add rows, and
some by NVLink.
"""

from dataclasses import dataclass
from math import ceil

import tilelang.language as T

from ....builtins import language as W
from ....passes import with_options
from .row_layout import load, load_padded, put, put_padded
from .token_blocks import TokenBlocks

_PUBLISHERS, _PUBLISHED = 128, 8
"""Maximum number of blocks that store weights on a rank, if each of their threads stores one; and
the weights of a thread if these blocks do not suffice. Each number of weights of a thread needs a
kernel of its own."""


@dataclass(frozen=True)
class CombineBlocks(TokenBlocks):
    """Division of the work among blocks: those that store weights, then those of each chunk."""

    MAX_HEIGHT = 4  # one signal follows the sums of a block

    def padded(self, count: int) -> int:
        """Return ``count``, rounded up to a multiple of the threads, as TileLang needs it to
        distribute numbers among them."""
        return ceil(count / self.layout.threads) * self.layout.threads

    @property
    def published(self) -> int:
        """Weights that a block stores on a rank."""
        threads = self.layout.threads
        is_small = self.tokens * self.choices <= _PUBLISHERS * threads
        return threads if is_small else _PUBLISHED * threads

    @property
    def publishers(self) -> int:
        """Blocks that store weights."""
        return self.ranks * ceil(self.tokens * self.choices / self.published)

    @property
    def parts(self) -> int:
        """Parts of a chunk: the tokens of each rank, and the sums of the own tokens."""
        return self.ranks + 1

    @property
    def total(self) -> int:
        """Blocks of a launch."""
        return self.publishers + self.chunks * self.of_chunk


@T.macro
def publish_weights(blocks, topk_weights, place, weights, block):
    """Store weights of this rank's tokens on a rank. Choices with the same row have one row there,
    so each has the sum of their weights."""
    size, choices, published = blocks.tokens * blocks.choices, blocks.choices, blocks.published
    peer, first = (W.rank() + 1 + block) % blocks.ranks, block // blocks.ranks * published
    value = T.alloc_fragment((published,), "float32")
    T.clear(value)
    for i in T.Parallel(published):
        for other in T.serial(choices):
            if first + i < size:
                same = (first + i) // choices * choices + other
                if place[same] == place[first + i]:
                    value[i] += topk_weights[same]
    for i in T.Parallel(published):
        if first + i < size:
            weights[peer, W.rank(), first + i] = value[i]


@T.macro
def add(layout, total, weight, row):
    """Add a row in registers, times its weight."""
    for v, j in T.Parallel(layout.padded, layout.width):
        if v < layout.vectors:
            total[v, j] += weight * row[v, j]


@T.macro
def add_rows(blocks, y, source, slots, weights, sums, owner, first):
    """Add the rows at this rank's experts of some tokens of ``owner``. Sums of tokens without rows
    are zero, so that all blocks store equally much."""
    layout, height, choices = blocks.layout, blocks.height, blocks.choices
    row = T.alloc_fragment((layout.padded, layout.width), layout.dtype)
    total = T.alloc_fragment((layout.padded, layout.width), "float32")
    entries = blocks.padded(height * choices)  # those past the last choice are not used
    number = T.alloc_fragment((entries,), "int32")
    slot_of = T.alloc_shared((entries,), "int32")
    weight_of = T.alloc_shared((entries,), "float32")
    for i in T.Parallel(entries):
        token = T.min(first + i // choices, blocks.tokens - 1)
        slot = slots[owner * blocks.tokens + token, i % choices]
        slot_of[i] = T.if_then_else(first + i // choices < blocks.tokens, slot, -1)
        number[i] = token * choices + source[T.max(slot, 0)] % choices
    for i in T.Parallel(entries):
        weight_of[i] = weights[W.rank(), owner, number[i]]
    for i in T.serial(height):
        T.clear(total)
        for choice in T.serial(choices):
            slot = slot_of[i * choices + choice]
            if slot >= 0:
                load(layout, y, slot, row)
                add(layout, total, weight_of[i * choices + choice], row)
        put_padded(layout, total, sums, blocks.place(W.rank(), owner), first + i)


@T.macro
def add_sums(blocks, place, sums, out, first):
    """Add the sums of the ranks that have rows of this rank's tokens, in rank order."""
    layout, height, ranks, choices = blocks.layout, blocks.height, blocks.ranks, blocks.choices
    row = T.alloc_fragment((layout.padded, layout.width), layout.dtype)
    total = T.alloc_fragment((layout.padded, layout.width), "float32")
    entries, capacity = blocks.padded(height * ranks), blocks.capacity
    count = T.alloc_fragment((entries,), "int32")
    rows_at = T.alloc_shared((entries,), "int32")
    T.clear(count)
    for i in T.Parallel(entries):
        for choice in T.serial(choices):
            number = place[T.min(first + i // ranks, blocks.tokens - 1) * choices + choice]
            if number >= i % ranks * capacity and number < (i % ranks + 1) * capacity:
                count[i] += 1
    T.copy(count, rows_at)
    for i in T.serial(height):
        if first + i < blocks.tokens:
            T.clear(total)
            for rank in T.serial(ranks):
                if rows_at[i * ranks + rank] > 0:
                    load_padded(layout, sums, blocks.place(rank, W.rank()), first + i, row)
                    add(layout, total, 1, row)
            put(layout, total, out, first + i)


def combine_program(blocks: CombineBlocks):
    """Return the program that adds the rows of y with their weights: those of a token at each rank
    in fp32, in the order of ``slots``, then the rounded sums of the ranks in fp32."""
    tokens, choices, ranks, layout = blocks.tokens, blocks.choices, blocks.ranks, blocks.layout

    @T.prim_func
    def combine(
        y: T.Tensor(layout.shape(blocks.capacity), layout.dtype),
        topk_weights: T.Tensor((tokens * choices,), "float32"),
        source: T.Tensor((blocks.capacity,), "int32"),  # (rank, token, choice) as one number, or -1
        slots: T.Tensor((ranks * tokens, choices), "int32"),  # rows of a token, descending, or -1
        place: T.Tensor((tokens * choices,), "int32"),  # (rank, row) as one number, or -1
        out: T.Tensor(layout.shape(tokens), layout.dtype),
    ):
        # Blocks wait only for blocks of lower index, on all ranks.
        with T.Kernel(blocks.total, threads=layout.threads) as block:
            weights = W.alloc_symmetric((ranks, tokens * choices), "float32")
            sums = W.alloc_symmetric((ranks, blocks.exchanged, layout.width), layout.dtype)
            if block < blocks.publishers:
                publish_weights(blocks, topk_weights, place, weights, block)
            else:
                part, first = blocks.part_of(block - blocks.publishers)
                if part < ranks:
                    owner = (W.rank() + 1 + part) % ranks
                    add_rows(blocks, y, source, slots, weights, sums, owner, first)
                else:
                    add_sums(blocks, place, sums, out, first)

    return with_options(combine, {"tileweave.granule": {"sums": (1, blocks.chunk, layout.width)}})
