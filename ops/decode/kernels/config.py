"""Parameters of the decode attention program, and their choice."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

LOG2_E = 1.4426950408889634
INTERLEAVED, CONTIGUOUS, LOCAL = SHARDINGS = ("interleaved", "contiguous", "local")
"""Values of ``sharding``: which tokens of a sequence each rank holds."""
_MAX_ROWS = 64
"""Maximum number of rows of queries of a block: those of one wgmma."""
_KEYS = 64
"""Keys of a tile."""
_MAX_SPLITS = 128
"""Maximum number of splits of the keys of a rank."""
STAGES = 2
"""Tiles of keys in shared memory: two blocks fit on an SM."""
_WARP_GROUP, _WIDTH = 128, 256
"""Threads of a warp group, and columns of the result that its registers hold."""
_BLOCKS = 264
"""Blocks of one warp group that attend, if there are enough keys: two for each SM of an H100 or
H200."""
_SECTION = 128
"""Maximum number of columns of a section of a value. Blocks merge sections, and the threads of a
block share the columns of a section equally."""
_MAX_MERGERS = 32
"""Maximum number of blocks that merge the splits of an item. They wait for each other, so a GPU has
to run this number of blocks at once."""
_LOADED, _POLLED = 32, 16
"""Maximum number of fp32 elements that a merging thread loads together, and that it polls together,
if one row has no more. A thread polls words of two elements, one after the other."""
_FEW_SPLITS = 8
"""Number of splits up to which a merging thread loads at most as many together."""
_LSE_COLUMNS = 4
"""Columns of a part after those of a section: the logarithm, and padding to 16 bytes."""


@dataclass(frozen=True)
class DecodeConfig:
    """Parameters of a program.

    Attributes:
        batch: sequences.
        heads, kv_heads: heads of q, and of the cache.
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
        return next(n for n in range(min(self.group, _MAX_ROWS), 0, -1) if self.group % n == 0)

    @property
    def items(self) -> int:
        """Groups of ``rows`` heads of all sequences."""
        return self.batch * self.heads // self.rows

    @property
    def M(self) -> int:
        """Rows of a tile of queries, of which the first ``rows`` are used."""
        return _MAX_ROWS

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
        """Maximum number of tokens of a sequence on a rank."""
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
        """Blocks of an item that merge its splits: its last ones."""
        return _divisor(self.part_rows, min(self.splits, _MAX_MERGERS))

    @property
    def merge_rows(self) -> int:
        """Sections whose splits one block merges."""
        return self.part_rows // self.mergers

    @property
    def splits_per_load(self) -> int:
        """Splits that a block loads together, a power of two: one of two numbers, so that few
        kernels serve all numbers of splits."""
        most = max(1, _LOADED * self.threads // (self.width * self.merge_rows))
        few = _FEW_SPLITS if self.splits <= _FEW_SPLITS else most
        return 1 << (min(most, few).bit_length() - 1)

    @property
    def rank_rows(self) -> int:
        """Sections whose parts of ranks one block merges: a divisor or a multiple of
        ``merge_rows``, which are sent together."""
        most = _POLLED * self.threads // (self.width * self.ranks)
        return _divisor(self.merge_rows, most) * _divisor(self.mergers, most // self.merge_rows)

    @property
    def ranks_per_load(self) -> int:
        """Parts of ranks that a block polls together."""
        return _divisor(self.ranks, _POLLED * self.threads // (self.width * self.rank_rows))

    @property
    def rank_blocks(self) -> int:
        """Blocks that merge parts of ranks; 0 for one rank."""
        return self.items * self.part_rows // self.rank_rows if self.ranks > 1 else 0

    @property
    def to_log2(self) -> float:
        """Factor from products of q and k to exponents of 2."""
        return self.scale * LOG2_E


def splits_for(items: int, tiles: int, blocks: int = _BLOCKS) -> int:
    """Return the number of splits, a power of two: enough to fill the GPU, and at least one tile of
    keys for each. It does not depend on the lengths of the sequences, so that CUDA graphs fit
    all."""
    most = min(max(blocks // items, 1), max(tiles, 1), _MAX_SPLITS)
    return 1 << (most.bit_length() - 1)


def _divisor(count: int, most: int) -> int:
    """Return the largest divisor of ``count`` that is at most ``most``, or 1."""
    return next((n for n in range(min(count, most), 0, -1) if count % n == 0), 1)
