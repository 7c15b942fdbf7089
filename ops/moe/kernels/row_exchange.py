"""Tile programs that pull rows from other ranks, at places that tables choose at run time.

Each rank copies its rows to symmetric memory, then blocks pull rows of all ranks::

    rank 0 | copy own rows | pull rows of ranks 0, 1, 2 in the order of a table |
    rank 1 | copy own rows |  pull ...
           |               ^ a block waits once for each rank of which it pulls rows

All rows of a rank have one counter. The copy runs at the speed of local memory, more than ten times
that of NVLink, and one counter costs less than one for each row.
"""

from dataclasses import dataclass
from math import ceil, gcd

import tilelang.language as T
import torch

from ....builtins import language as W
from ...collectives.vectors import itemsize_of, words_of
from ...core.tiles import DEVICE

_VECTOR_BYTES = 16
"""Most bytes that a thread loads at once."""
_ROW_VECTORS, _STORED_VECTORS = 8, 16
"""Vectors that a thread holds: of a row, and of rows on their way to symmetric memory."""
_THREADS = 64, 1024
"""Least and most threads of a block, powers of two."""
_THREADS_PER_SM = 1024
"""Threads that pull on an SM: with ``_ROW_VECTORS`` loads each, enough to cover the latency of
NVLink."""


@dataclass(frozen=True)
class RowLayout:
    """Division of rows into vectors and among threads.

    Attributes:
        vectors, width: number of vectors in a row, and elements of a vector.
        dtype: type of the elements in TileLang's spelling.
        threads: threads of a block.
        blocks: blocks that pull rows.
    """

    vectors: int
    width: int
    dtype: str
    threads: int
    blocks: int

    @staticmethod
    def of(columns: int, dtype: str) -> "RowLayout":
        """Return the layout of rows with ``columns`` elements."""
        width = gcd(columns, _VECTOR_BYTES // itemsize_of(dtype))
        vectors, (least, most) = columns // width, _THREADS
        threads = 1 << (ceil(vectors / _ROW_VECTORS) - 1).bit_length()
        threads = min(max(threads, least), most)
        blocks = DEVICE.sm_count * _THREADS_PER_SM // threads
        return RowLayout(vectors, width, dtype, threads, blocks)

    @staticmethod
    def opaque(columns: int, dtype: torch.dtype) -> "RowLayout":
        """Return the layout of rows that are only moved, in the widest type."""
        word, words = words_of(columns * dtype.itemsize)
        return RowLayout.of(words, word)

    @property
    def padded(self) -> int:
        """Vectors of a row in registers: a multiple of the threads, which TileLang needs to
        distribute them."""
        return ceil(self.vectors / self.threads) * self.threads

    @property
    def chunk(self) -> int:
        """Vectors that a block copies to symmetric memory."""
        return _STORED_VECTORS * self.threads

    def shape(self, rows: int) -> tuple[int, int]:
        """Return the shape of a tensor with ``rows`` rows."""
        return rows * self.vectors, self.width


@T.macro
def publish(x, rows, registers, block, chunk):
    """Copy part ``block`` of this rank's rows to its symmetric memory."""
    T.copy(x[block * chunk, 0], registers)
    T.copy(registers, rows[W.rank(), block * chunk, 0])


@T.macro
def pull(layout, rows, owner, number, row):
    """Load row ``number`` of a rank into registers."""
    # The bound hides that rows begin at multiples of their length: the whole axis counts as read,
    # and has one counter instead of one a row.
    first = T.min(number * layout.vectors, rows.shape[1] - 1)
    for i, j in T.Parallel(layout.padded, layout.width):
        if i < layout.vectors:
            row[i, j] = rows[owner, first + i, j]


@T.macro
def put(layout, row, out, number):
    """Store registers in row ``number`` of the result."""
    for i, j in T.Parallel(layout.padded, layout.width):
        if i < layout.vectors:
            out[number * layout.vectors + i, j] = row[i, j]


def dispatch_program(
    tokens: int, choices: int, capacity: int, ranks: int, layout: RowLayout, clear_rest: bool = True
):
    """Return the program that pulls x of each token in ``source`` once, and stores it in all rows
    of the token.

    Args:
        tokens, choices: extents of the routing of a rank.
        capacity: rows of the result.
        clear_rest: whether other rows become zero; otherwise they are not written.
    """
    vectors, dtype = layout.vectors, layout.dtype
    padded, chunk, blocks = layout.padded, layout.chunk, layout.blocks
    copies, waves = ceil(tokens * vectors / chunk), ceil(capacity / blocks)
    blocks = min(blocks, capacity)

    @T.prim_func
    def dispatch(
        x: T.Tensor(layout.shape(tokens), dtype),
        source: T.Tensor((capacity,), "int32"),  # (rank, token, choice) as one number, or -1
        slots: T.Tensor((ranks * tokens, choices), "int32"),  # rows of a token, descending, or -1
        out: T.Tensor(layout.shape(capacity), dtype),
    ):
        # Blocks wait only for blocks of lower index, on all ranks.
        with T.Kernel(copies + blocks, threads=layout.threads) as block:
            rows = W.alloc_symmetric(layout.shape(tokens), dtype)
            registers = T.alloc_fragment((chunk, layout.width), dtype)
            row = T.alloc_fragment((padded, layout.width), dtype)
            if block < copies:
                publish(x, rows, registers, block, chunk)
            else:
                for wave in T.serial(waves):
                    slot = wave * blocks + block - copies
                    if slot < capacity:
                        number = source[slot]
                        if number >= 0:
                            if slots[number // choices, 0] == slot:
                                owner = number // (tokens * choices)
                                token = number % (tokens * choices) // choices
                                pull(layout, rows, owner, token, row)
                                for choice in T.serial(choices):
                                    copy = slots[number // choices, choice]
                                    if copy >= 0:
                                        put(layout, row, out, copy)
                        elif clear_rest:
                            T.clear(row)
                            put(layout, row, out, slot)

    return dispatch
