"""Parameters of the decode attention program, and their choice."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

LOG2_E = 1.4426950408889634
INTERLEAVED, CONTIGUOUS, LOCAL = SHARDINGS = ("interleaved", "contiguous", "local")
"""Values of ``sharding``: which tokens of a sequence each rank holds."""
_MOST_ROWS = 64
"""Most rows of queries of a block: those of one wgmma."""
_KEYS = 64
"""Keys of a tile."""
_MOST_SPLITS = 128
"""Most splits of the keys of a rank, which a block merges."""
STAGES = 2
"""Tiles of keys in shared memory: two blocks fit on an SM."""
_WARP_GROUP, _WIDTH = 128, 256
"""Threads of a warp group, and columns of the result that its registers hold."""
_BLOCKS = 264
"""Blocks of one warp group that attend, if there are enough keys: two for each SM of an H100 or
H200."""
_SECTION = 128
"""Most columns that are merged together; longer values are merged section by section. Each block
merges sections: the threads of a block share the columns of a section equally, and parts with more
columns exceed the shared memory beside latent caches."""
_LOAD_ELEMENTS = 2048
"""Most fp32 elements of parts that a block loads together, if one row has no more: a thread polls
its words one after the other, at most 8."""
_LSE_COLUMNS = 4
"""Columns of a part after those of a section: the logarithm, and padding to 16 bytes."""


@dataclass(frozen=True)
class DecodeConfig:
    """Parameters of a program.

    Attributes:
        batch: sequences.
        heads, kv_heads: of q and of the cache.
        dim, v_dim: elements of a key, and of a value. Values are the first columns of keys if these
            numbers differ.
        pages, page_size: pages of the cache of a rank, and tokens of a page.
        table: pages of a sequence in the block table of a rank.
        ranks: ranks that share the tokens.
        dtype: type of q, as TileLang writes it; a 16-bit type.
        cache_dtype: type of the cache: that of q, or float8_e4m3fn.
        scale: factor of the products of q and k.
        sharding: one of ``SHARDINGS``.
        has_lse: whether the logarithms are results.
        parts: number of splits of the keys on a rank; None for that of ``splits_for``.
        merges_within, stages, load_elements, resident: variants for measurements.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    pages: int
    page_size: int
    table: int
    ranks: int
    dtype: str
    cache_dtype: str
    scale: float
    sharding: str = INTERLEAVED
    has_lse: bool = False
    parts: int | None = None
    merges_within: bool = False
    stages: int = STAGES
    load_elements: int = _LOAD_ELEMENTS
    resident: int = 2

    @property
    def is_latent(self) -> bool:
        """Return whether values are the first columns of keys."""
        return self.dim != self.v_dim

    @property
    def is_quantized(self) -> bool:
        """Return whether the cache has another type than q, and scales."""
        return self.cache_dtype != self.dtype

    @property
    def threads(self) -> int:
        """Threads of a block that compute: a warp group for each 256 columns of values."""
        return _WARP_GROUP * ceil(self.v_dim / _WIDTH)

    @property
    def group(self) -> int:
        """Heads of q for one head of the cache."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Heads of q that a block attends with: the largest divisor of ``group`` that fits."""
        return next(n for n in range(min(self.group, _MOST_ROWS), 0, -1) if self.group % n == 0)

    @property
    def items(self) -> int:
        """Groups of ``rows`` heads of all sequences."""
        return self.batch * self.heads // self.rows

    @property
    def M(self) -> int:
        """Rows of a tile of queries, of which the first ``rows`` are used."""
        return _MOST_ROWS

    @property
    def N(self) -> int:
        """Keys of a tile."""
        return _KEYS

    @property
    def run(self) -> int:
        """Tokens of a tile that are consecutive in the cache."""
        return min(self.page_size, self.N)

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence on a rank."""
        return self.table * self.page_size

    @property
    def splits(self) -> int:
        """Splits of the keys of each sequence on a rank."""
        blocks = _BLOCKS * _WARP_GROUP // self.threads
        return self.parts or splits_for(self.items, ceil(self.capacity / self.N), blocks)

    @property
    def width(self) -> int:
        """Columns of a section of a value."""
        return min(self.v_dim, _SECTION)

    @property
    def sections(self) -> int:
        """Sections of a value."""
        return self.v_dim // self.width

    @property
    def part_rows(self) -> int:
        """Rows of a part: the sections of the heads that a block attends with."""
        return self.rows * self.sections

    @property
    def columns(self) -> int:
        """Columns of a part: those of a section, and its logarithm."""
        return self.width + _LSE_COLUMNS

    @property
    def mergers(self) -> int:
        """Blocks of an item that merge: its last ones."""
        return gcd(self.part_rows, min(self.splits, 8))

    @property
    def merge_rows(self) -> int:
        """Sections that one block merges."""
        if self.merges_within:
            return self.part_rows // self.mergers
        most = max(1, _LOAD_ELEMENTS // (self.width * max(self.splits, self.ranks)))
        return gcd(self.part_rows, 1 << (most.bit_length() - 1))

    @property
    def merge_blocks(self) -> int:
        """Number of blocks that merge; 0 if there is one part."""
        if self.splits == self.ranks == 1:
            return 0
        return self.batch * self.heads * self.sections // self.merge_rows

    def parts_per_load(self, parts: int) -> int:
        """Return the number of parts that a block loads together: a divisor of ``parts``."""
        most = max(1, self.load_elements // (self.width * self.merge_rows))
        return next(n for n in range(min(parts, most), 0, -1) if parts % n == 0)

    @property
    def to_log2(self) -> float:
        """Factor from products of q and k to exponents of 2."""
        return self.scale * LOG2_E


def splits_for(items: int, tiles: int, blocks: int = _BLOCKS) -> int:
    """Return the number of splits, a power of two: enough to fill the GPU, and at least one tile of
    keys for each. It does not depend on the lengths of the sequences, so that CUDA graphs fit
    all."""
    most = min(max(blocks // items, 1), max(tiles, 1), _MOST_SPLITS)
    return 1 << (most.bit_length() - 1)
