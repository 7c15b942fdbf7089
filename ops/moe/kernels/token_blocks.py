"""Division of the tokens of an exchange among blocks, for ``dispatch`` and ``combine``."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil

from .row_layout import RowLayout


@dataclass(frozen=True)
class TokenBlocks(ABC):
    """Blocks of a launch, each for a few tokens. Ranks exchange the tokens in chunks.

    Attributes:
        tokens, choices: extents of the routing of a rank.
        capacity: rows of each rank's experts.
        layout: layout of a row.
    """

    tokens: int
    choices: int
    capacity: int
    ranks: int
    layout: RowLayout

    @property
    @abstractmethod
    def height(self) -> int:
        """Tokens of a block."""

    @property
    @abstractmethod
    def chunks(self) -> int:
        """Chunks of the tokens of a rank."""

    @property
    def of_rank(self) -> int:
        """Blocks of a chunk for the tokens of one rank."""
        return ceil(self.tokens / (self.chunks * self.height))

    @property
    def chunk(self) -> int:
        """Vectors of one rank's tokens in a chunk. Rows have padding."""
        return self.of_rank * self.height * self.layout.padded

    @property
    def exchanged(self) -> int:
        """Vectors of one rank's tokens in symmetric memory, in whole chunks."""
        return self.chunks * self.chunk
