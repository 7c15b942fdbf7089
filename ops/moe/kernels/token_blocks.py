"""Division of the tokens of an exchange among blocks, for ``dispatch`` and ``combine``."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from .row_layout import RowLayout

_CHUNKS = 4
"""Chunks whose blocks together are as many as ``RowLayout.blocks``. Larger chunks would leave
NVLink idle at the first one."""
_UNUSED_SHARE = 0.25
"""Maximum share of the tokens that a rank does not need, for ``is_stored``."""


@dataclass(frozen=True)
class TokenBlocks(ABC):
    """Blocks of a launch, each for a few tokens. Ranks exchange the tokens in chunks; the blocks of
    a chunk have consecutive numbers.

    Attributes:
        tokens, choices: extents of the routing of a rank.
        capacity: rows of each rank's experts.
        layout: layout of a row.
        is_padded: see ``RowProblem``.
        MAX_HEIGHT: maximum number of tokens of a block.
    """

    MAX_HEIGHT: ClassVar[int]
    tokens: int
    choices: int
    capacity: int
    ranks: int
    layout: RowLayout
    is_padded: bool = False

    @property
    @abstractmethod
    def parts(self) -> int:
        """Parts of a chunk. The blocks of each have all of its tokens of one rank."""

    @property
    def height(self) -> int:
        """Tokens of a block."""
        return min(self.MAX_HEIGHT, ceil(self.ranks * self.tokens / self.layout.blocks))

    @property
    def chunks(self) -> int:
        """Chunks of the tokens of a rank."""
        most = max(1, self.layout.blocks // _CHUNKS // self.parts)
        return ceil(self.tokens / (most * self.height))

    @property
    def of_rank(self) -> int:
        """Blocks of a part."""
        return ceil(self.tokens / (self.chunks * self.height))

    @property
    def of_chunk(self) -> int:
        """Blocks of a chunk."""
        return self.parts * self.of_rank

    @property
    def chunk(self) -> int:
        """Vectors of one rank's tokens in a chunk. Rows have padding."""
        return self.of_rank * self.height * self.layout.padded

    @property
    def exchanged(self) -> int:
        """Vectors of one rank's tokens in symmetric memory, in whole chunks."""
        return self.chunks * self.chunk

    @property
    def is_stored(self) -> bool:
        """True if ranks push all tokens to all ranks; else they pull those that they need. Pushes
        take less time if ranks need most tokens (benchmarks/LOG.md), at random experts."""
        unused = (1 - 1 / self.ranks) ** self.choices
        return not self.is_padded and unused <= _UNUSED_SHARE

    def place(self, source: Any, target: Any) -> tuple[Any, Any]:
        """Return the rank that holds what ``source`` has for ``target``, and the index there, which
        is the number of the other rank."""
        return (target, source) if self.is_stored else (source, target)

    def part_of(self, block: Any) -> tuple[Any, Any]:
        """Return the part of a block, and the number of its first token."""
        chunk, number = block // self.of_chunk, block % self.of_chunk
        first = (chunk * self.of_rank + number % self.of_rank) * self.height
        return number // self.of_rank, first
