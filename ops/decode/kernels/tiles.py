"""Load tiles of keys and values from pages, and convert them to the type of q."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from ...collectives.vectors import itemsize_of

_BYTES = 128
"""Maximum number of bytes of a row that one copy of a run loads: the width of the 128-byte
swizzle."""


@dataclass(frozen=True)
class Split:
    """Keys of a block.

    Attributes:
        sequence, kv_head: sequence in the batch, and head of the cache.
        keys: keys of the sequence on this rank.
        begin, steps: first tile of keys, and number of tiles.
    """

    sequence: Any
    kv_head: Any
    keys: Any
    begin: Any
    steps: Any


@dataclass(frozen=True)
class Tile:
    """Tile of a cache in shared memory.

    Attributes:
        loaded: the tile in the type of the cache.
        operand: the tile in the type of q; ``loaded`` if the types are equal.
    """

    loaded: Any
    operand: Any


def alloc_tile(config: Any, columns: int) -> Tile:
    """Allocate a ``Tile`` for the keys of one step."""
    loaded = T.alloc_shared((config.N, columns), config.cache_dtype)
    if config.is_quantized:
        return Tile(loaded, T.alloc_shared((config.N, columns), config.dtype))
    return Tile(loaded, loaded)


def load_tile(
    config: Any, inputs: Any, split: Split, step: Any, cache: Any, column: Any, tile: Tile
) -> None:
    """Emit the copies of a tile from column ``column`` of a cache, one for each run of tokens.

    It is no macro: a macro would bind rows to variables, and TileLang would then move the copies
    out of the producer warp.
    """
    for begin in range(0, config.N, config.run):
        token = (split.begin + step) * config.N + begin
        # Tokens after the last one use its page: the block table has no entries for others.
        page = inputs.block_table[split.sequence, T.min(token, split.keys - 1) // config.page_size]
        row = page * config.page_size + token % config.page_size
        if config.run == config.N:
            T.evaluate(T.copy(cache[row, column], tile.loaded))
            continue
        columns = int(tile.loaded.shape[1])
        width = min(columns, _BYTES // itemsize_of(config.cache_dtype))
        for j in range(0, columns, width):
            source = cache[row : row + config.run, column + j : column + j + width]
            T.evaluate(T.copy(source, tile.loaded[begin : begin + config.run, j : j + width]))


@T.macro
def convert(config, tile):
    """Convert a tile to the type of q."""
    if config.is_quantized:
        # A copy would convert to fp16 and then to bf16; the second step runs at a quarter of the
        # rate of float32 to bf16.
        for i, j in T.Parallel(*tile.loaded.shape):
            tile.operand[i, j] = T.cast(tile.loaded[i, j], "float32")
