"""Groups of simulated ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Ranks that call a plan together.

    Attributes:
        name: axis of the mesh; empty for the group of all ranks.
        ranks: among all ranks, by the rank in the group.
    """

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)
