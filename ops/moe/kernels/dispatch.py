"""Tile program of ``dispatch``: each token crosses NVLink once for each rank, to all of its rows.

For one chunk of tokens after the other, each rank stores its tokens on the other ranks. Then blocks
load the tokens of all ranks, and store each in all of its rows::

    rank 0 | send chunk 0 | own tokens, tokens of ranks 1, 2, ... | send chunk 1 | own tokens, ...
    rank 1 | send chunk 0 | own tokens, tokens of ranks 2, ...
                                        ^ wait for the chunk of a rank

If ranks need few of the tokens, a rank stores a chunk in its own symmetric memory, and the others
load the tokens that they need. Blocks of several chunks run at the same time: some are limited by
memory, as they store rows, and some by NVLink.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import tilelang.language as T

from ....builtins import language as W
from ....passes import with_options
from .row_layout import load, load_padded, put, put_padded
from .token_blocks import TokenBlocks


@dataclass(frozen=True)
class DispatchBlocks(TokenBlocks):
    """Division of the work among blocks: those of each chunk, then those that clear rows.

    Attributes:
        clear_rest: whether rows of the result that have no token become zero.
    """

    MAX_HEIGHT = 2
    clear_rest: bool = True

    @property
    def senders(self) -> int:
        """Parts of a chunk that send the own tokens: none if there is no other rank."""
        return min(1, self.ranks - 1)

    @property
    def parts(self) -> int:
        """Parts of a chunk: those that send, and the tokens of each rank."""
        return self.senders + self.ranks

    @property
    def clearers(self) -> int:
        """Blocks that clear rows."""
        return min(self.layout.blocks, self.capacity) if self.clear_rest else 0

    @property
    def copies(self) -> int:
        """Places where a rank stores its tokens."""
        return self.ranks - 1 if self.is_stored else 1

    @property
    def sources(self) -> int:
        """Ranks whose tokens are stored in the symmetric memory of a rank."""
        return self.ranks if self.is_stored else 1

    def place(self, source: Any, target: Any) -> tuple[Any, Any]:
        """See ``TokenBlocks``. Ranks that load tokens share one copy of them."""
        return super().place(source, target if self.is_stored else 0)


@T.macro
def send(blocks, x, rows, row, first):
    """Store tokens for the other ranks. The last chunk ends with copies of the last token, so that
    all blocks store equally many."""
    layout = blocks.layout
    for i in T.serial(blocks.height):
        load(layout, x, T.min(first + i, blocks.tokens - 1), row)
        for step in T.serial(blocks.copies):
            place = blocks.place(W.rank(), (W.rank() + 1 + step) % blocks.ranks)
            put_padded(layout, row, rows, place, first + i)


@T.macro
def receive(blocks, x, rows, slots, out, row, owner, first):
    """Load each token of ``owner`` once, if it has rows here, and store it in all of them."""
    layout, tokens = blocks.layout, blocks.tokens
    for i in T.serial(blocks.height):
        token = first + i
        if token < tokens:
            if slots[owner * tokens + token, 0] >= 0:
                if owner == W.rank():
                    load(layout, x, token, row)
                else:
                    load_padded(layout, rows, blocks.place(owner, W.rank()), token, row)
                for choice in T.serial(blocks.choices):
                    slot = slots[owner * tokens + token, choice]
                    if slot >= 0:
                        put(layout, row, out, slot)


@T.macro
def clear(blocks, source, out, row, block):
    """Clear every ``clearers``-th row of the result, if it has no token."""
    T.clear(row)
    for wave in T.serial(ceil(blocks.capacity / blocks.clearers)):
        slot = wave * blocks.clearers + block
        if slot < blocks.capacity:
            if source[slot] < 0:
                put(blocks.layout, row, out, slot)


def dispatch_program(blocks: DispatchBlocks):
    """Return the program that loads each token once that has rows here, and stores it in all of
    them."""
    tokens, choices, capacity, ranks = blocks.tokens, blocks.choices, blocks.capacity, blocks.ranks
    layout, exchanging = blocks.layout, blocks.chunks * blocks.of_chunk

    @T.prim_func
    def dispatch(
        x: T.Tensor(layout.shape(tokens), layout.dtype),
        source: T.Tensor((capacity,), "int32"),  # (rank, token, choice) as one number, or -1
        slots: T.Tensor((ranks * tokens, choices), "int32"),  # rows of a token, descending, or -1
        out: T.Tensor(layout.shape(capacity), layout.dtype),
    ):
        # Blocks wait only for blocks of lower index, on all ranks.
        with T.Kernel(exchanging + blocks.clearers, threads=layout.threads) as block:
            rows = W.alloc_symmetric((blocks.sources, blocks.exchanged, layout.width), layout.dtype)
            row = T.alloc_fragment((layout.padded, layout.width), layout.dtype)
            if block < exchanging:
                part, first = blocks.part_of(block)
                if part < blocks.senders:
                    send(blocks, x, rows, row, first)
                else:
                    owner = (W.rank() + part - blocks.senders) % ranks
                    receive(blocks, x, rows, slots, out, row, owner, first)
            elif blocks.clear_rest:
                clear(blocks, source, out, row, block - exchanging)

    return with_options(dispatch, {"tileweave.granule": {"rows": (1, blocks.chunk, layout.width)}})
