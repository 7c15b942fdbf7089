"""Tile program of ``dispatch``: blocks pull each token that has rows at this rank's experts.

Each rank copies its tokens to symmetric memory. For one chunk of tokens after the other, blocks
load the tokens of all ranks, and store each in all of its rows::

    rank 0 | copy chunks 0, 1, ... | chunk 0: own tokens, those of ranks 1, 2, ... | chunk 1: ...
    rank 1 | copy chunks ...       | chunk 0: own ...
                                                   ^ wait for the chunk of a rank

So a token crosses NVLink once, also if it goes to several experts of a rank.
"""

from dataclasses import dataclass
from math import ceil

import tilelang.language as T

from ....builtins import language as W
from ....passes import with_options
from .row_layout import load, put
from .token_blocks import TokenBlocks

_TOKENS, _CHUNKS = 4, 8
"""Maximum numbers of tokens that a block publishes, and of chunks of a rank's tokens. Ranks pull
the tokens of one chunk while the next ones are published."""


@dataclass(frozen=True)
class DispatchBlocks(TokenBlocks):
    """Division of the work among blocks: those that publish tokens, then those that pull them.

    Attributes:
        clear_rest: whether rows of the result that have no token become zero.
    """

    clear_rest: bool = True

    @property
    def height(self) -> int:
        """Tokens that a block publishes."""
        return min(_TOKENS, ceil(self.tokens / self.layout.blocks))

    @property
    def chunks(self) -> int:
        """Chunks of the tokens of a rank, at most ``_CHUNKS``, of equally many blocks."""
        of_chunk = ceil(self.tokens / (_CHUNKS * self.height))
        return ceil(self.tokens / (of_chunk * self.height))

    @property
    def publishers(self) -> int:
        """Blocks that publish tokens; none if no other rank pulls them."""
        return self.chunks * self.of_rank if self.ranks > 1 else 0

    @property
    def pullers(self) -> int:
        """Blocks that pull tokens."""
        return min(self.layout.blocks, self.ranks * self.tokens)


@T.macro
def publish(blocks, x, rows, row, block):
    """Copy the tokens of a block to symmetric memory. Rows have padding, and the last chunk has
    copies of the last token, so that no store has a condition and one signal follows all of
    them."""
    layout, height = blocks.layout, blocks.height
    for i in T.serial(height):
        load(layout, x, T.min(block * height + i, blocks.tokens - 1), row)
        for v, j in T.Parallel(layout.padded, layout.width):
            rows[W.rank(), (block * height + i) * layout.padded + v, j] = row[v, j]


@T.macro
def pull(blocks, x, rows, slots, out, row, number):
    """Load a token once, if it has rows here, and store it in all of them.

    Args:
        number: number of the token. Tokens of all ranks alternate, so that NVLink and the memory of
            this rank are busy at the same time.
    """
    layout, tokens = blocks.layout, blocks.tokens
    owner, token = (W.rank() + number) % blocks.ranks, number // blocks.ranks
    if slots[owner * tokens + token, 0] >= 0:
        if owner == W.rank():
            load(layout, x, token, row)
        else:
            for v, j in T.Parallel(layout.padded, layout.width):
                if v < layout.vectors:
                    row[v, j] = rows[owner, token * layout.padded + v, j]
        for choice in T.serial(blocks.choices):
            slot = slots[owner * tokens + token, choice]
            if slot >= 0:
                put(layout, row, out, slot)


def dispatch_program(blocks: DispatchBlocks):
    """Return the program that loads each token once that has rows here, and stores it in all of
    them."""
    tokens, choices, capacity, ranks = blocks.tokens, blocks.choices, blocks.capacity, blocks.ranks
    layout, publishers, pullers = blocks.layout, blocks.publishers, blocks.pullers

    @T.prim_func
    def dispatch(
        x: T.Tensor(layout.shape(tokens), layout.dtype),
        source: T.Tensor((capacity,), "int32"),  # (rank, token, choice) as one number, or -1
        slots: T.Tensor((ranks * tokens, choices), "int32"),  # rows of a token, descending, or -1
        out: T.Tensor(layout.shape(capacity), layout.dtype),
    ):
        # Blocks wait only for blocks of lower index, on all ranks.
        with T.Kernel(publishers + pullers, threads=layout.threads) as block:
            rows = W.alloc_symmetric((blocks.exchanged, layout.width), layout.dtype)
            row = T.alloc_fragment((layout.padded, layout.width), layout.dtype)
            if block < publishers:
                publish(blocks, x, rows, row, block)
            else:
                for wave in T.serial(ceil(ranks * tokens / pullers)):
                    number = wave * pullers + block - publishers
                    if number < ranks * tokens:
                        pull(blocks, x, rows, slots, out, row, number)
                if blocks.clear_rest:
                    T.clear(row)
                    for wave in T.serial(ceil(capacity / pullers)):
                        slot = wave * pullers + block - publishers
                        if slot < capacity:
                            if source[slot] < 0:
                                put(layout, row, out, slot)

    return with_options(dispatch, {"tileweave.granule": {"rows": (blocks.chunk, layout.width)}})
